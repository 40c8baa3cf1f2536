"""Every kernel compiles for Hopper, fits its shared memory and reaches its matrix instructions: with `make test` for a
batch of decoding and one of prompts, with `make test-all` for every tile that the tables choose. Other chips by hand:
`python tests/kernels/triton/compile_for.py 80` (89, 100)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ARCH, SHARED = 90, 227 << 10
REACHED = (
    ("_gate_up", "HGMMA"),
    ("_down", "HGMMA"),
    ("_gate_up", "QGMMA"),
    ("_down", "QGMMA"),
    ("_chunks", "HGMMA"),
    ("_attend_latent", "HGMMA"),
)


def test_what_the_tests_interpret_is_not_interpreted_elsewhere():
    """Triton's knobs write environment variables, which the processes that tests start would inherit."""
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_kernels_compile(cache, which):
    """What was compiled for an earlier run, of the same source by the same compiler, Triton finds again."""
    folder = str(cache.mkdir("afserve-triton"))
    environment = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, str(HERE / "compile_for.py"), str(ARCH), which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel.get("stack", 0) <= 384, kernel  # bytes of spilled registers per thread
    for name, instruction in REACHED:
        assert any(k["kernel"] == name and instruction in k.get("matrix", ()) for k in kernels), (
            name,
            instruction,
        )
