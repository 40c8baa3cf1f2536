"""An outside load client through kills: guidellm reports no error. Skips where guidellm is not installed."""

import importlib.util
import json
import re
import subprocess
import sys

import httpx
import pytest

from tests.e2e.streams import wait
from tests.e2e.test_losses import incidents, kill, lost, serving, whole

pytestmark = [pytest.mark.process, pytest.mark.long]
SECONDS = 30


@pytest.mark.skipif(importlib.util.find_spec("guidellm") is None, reason="guidellm is not installed")
def test_guidellm_reports_no_error_when_nodes_are_killed(up, tmp_path):
    server, report = (
        up("--attention", "2", "--experts", "3", "--expert-copies", "2"),
        tmp_path / "report.json",
    )
    command = [
        sys.executable, "-m", "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=constant,rate=4",
        "--constraint", f"kind=max_duration,seconds={SECONDS}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=64",
        "--tokenizer", "kind=huggingface_auto,model=configs/nano",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    with open(tmp_path / "printed", "w+") as printed:
        client = subprocess.Popen(command, stdout=printed, stderr=printed)
        for turn, name in enumerate(("expert-1", "attention-0")):
            wait(lambda: client.poll() is not None or running(server), "a request")
            assert client.poll() is None, (tmp_path / "printed").read_text()
            kill(serving(server)[name])
            wait(lambda: lost(server) > turn and name in incidents(server, "returned"), "its return")  # noqa: B023
            whole(server)
        assert client.wait(4 * SECONDS) == 0, (tmp_path / "printed").read_text()
    (bench,) = json.loads(report.read_text())["benchmarks"]
    totals = bench["metrics"]["request_totals"]
    assert totals["errored"] == 0 and totals["successful"] > SECONDS, totals
    assert server.stop()[0] == 0


def running(server):
    """Requests that attention nodes compute."""
    said = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", said, re.MULTILINE)))
