"""A run on a Ray cluster that is simulated here: the same tokens, streams, lost actors and hosts, other counts.

Skipped where Ray is not installed (`pip install 'afserve[ray]'`).
"""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Up

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: afserve[ray]"),
    pytest.mark.timeout(600),
]
PROMPT = "def main():"
STORE = 80 << 20

# Ray is used in a process of its own: it changes signal handlers and warns about what tests count as errors.
CLUSTER = f"""
import json, sys
from ray.cluster_utils import Cluster

options = dict(object_store_memory={STORE}, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, resources=dict(att=2), **options))
hosts = [cluster.add_node(num_cpus=3, resources=dict(exp=3), **options) for _ in range(2)]
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    if line.strip() == "kill":
        cluster.remove_node(hosts.pop(), allow_graceful=False)
    else:
        hosts.append(cluster.add_node(num_cpus=3, resources=dict(exp=3), **options))
    print(json.dumps(len(hosts)), flush=True)
cluster.shutdown()
"""


class Cluster:
    """A head with two places for attention nodes, and two hosts with three for expert nodes."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets' paths have at most 107 bytes
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_TMPDIR": self.folder, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        self.address = self._answer()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.communicate(timeout=60)
        for one in psutil.wait_procs(family, timeout=20)[1]:
            one.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone() -> str:
    """What one machine answers."""
    from afserve import LLM, SamplingParams

    with LLM("nano", attention=1, experts=2) as llm:
        return llm.generate([PROMPT], SamplingParams(max_tokens=32, temperature=0))[0].text


ROLES = ("--ray-attention", "CPU=1,att=1", "--ray-experts", "CPU=1,exp=1")


@pytest.fixture
def admin(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text("a-secret-key\n")
    path.chmod(0o600)
    return path


def text_of(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def streamed(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "stream": True}
    text = ""
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def until(server: Up, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, server.printed()
        time.sleep(0.2)


def ready(server: Up) -> dict[str, int]:
    nodes = httpx.get(f"{server.url}/status", headers=KEY).json()["nodes"]
    return {node["name"]: node["pid"] for node in nodes if node["state"] == "ready"}


KEY = {"Authorization": "Bearer a-secret-key"}


def command(server: Up, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "afserve", *words, "--url", server.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_on_ray_from_its_start_to_afserve_down(
    cluster: Cluster, alone: str, admin: Path, up: Callable[..., Up]
) -> None:
    flags = ("--attention", "1", "--experts", "2", "--expert-copies", "2", "--admin-key-file", str(admin))
    server = up("--ray", cluster.address, *ROLES, *flags)
    assert text_of(server.url) == alone
    assert asyncio.run(streamed(server.url)) == alone

    # The parent of an expert node's process is Ray's actor: with it the node goes, and both are replaced.
    before = ready(server)
    os.kill(psutil.Process(before["expert-0"]).ppid(), signal.SIGKILL)
    assert text_of(server.url) == alone
    until(server, lambda: ready(server).get("expert-0", before["expert-0"]) != before["expert-0"])

    # Two more nodes, and one less.
    key = ("--admin-key-file", str(admin))
    assert "expert-2 serves" in command(server, "scale", "--attention", "+1", "--experts", "+1", *key)
    assert text_of(server.url) == alone
    command(server, "scale", "--experts", "-1", *key)
    assert "expert-2" not in ready(server)

    # A host of Ray's is lost with what is on it. Another one comes, and the node returns there.
    asked = [asyncio.run(streamed(server.url))]
    cluster.say("kill")
    asked += [text_of(server.url) for _ in range(4)]
    assert set(asked) == {alone}
    cluster.say("add")
    until(server, lambda: {"expert-0", "expert-1"} <= ready(server).keys())
    assert text_of(server.url) == alone

    family = [psutil.Process(pid) for pid in ready(server).values()]
    assert "it has ended" in command(server, "down", *key)
    code, _ = server.wait()
    assert code == 0
    assert not psutil.wait_procs(family, timeout=15)[1]


def test_what_ray_lacks_is_said(cluster: Cluster, up: Callable[..., Up]) -> None:
    asking = ("--ray", cluster.address, "--experts", "2", "--ray-experts", "CPU=1,gold=2", "--ray-wait", "2")
    code, said = up(*asking, ready=False).wait()
    assert code == 2
    assert "2 expert nodes with CPU=1,gold=2 each, spread" in said
    assert "gold: asked 4, there is 0 (0 free)" in said and "3 hosts" in said


def test_no_cluster_is_said(up: Callable[..., Up]) -> None:
    code, said = up("--ray", "127.0.0.1:1", ready=False).wait()
    assert code == 2 and "no Ray cluster answers at 127.0.0.1:1" in said
