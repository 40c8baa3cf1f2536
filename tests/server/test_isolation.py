"""The gateway's process: no torch, and small."""

import subprocess
import sys

import pytest

CODE = """
import sys
from pathlib import Path
import afserve.server.app, afserve.server.serve, afserve.doors.client, afserve.server.metrics.observe
heavy = {"torch", "transformers", "pydantic", "grpc", "prometheus_client"} & set(sys.modules)
assert not heavy, heavy
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""

CLIENT = """
import sys
import afserve.cli.chat.command, afserve.cli.chat.complete
heavy = {"torch", "transformers", "numpy", "grpc", "starlette", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_gateway_imports_no_torch_and_stays_small():
    assert int(run(CODE)) < 100 * 1024  # KiB, at its highest


@pytest.mark.slow
def test_client_commands_import_nothing_heavy():
    run(CLIENT)
