"""What containers run, started without containers: the image's default, and each pod of the Kubernetes manifests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from afserve.launch.plan.cluster import read_cluster
from afserve.launch.render.kubernetes import RUN, KubernetesSettings, manifests
from afserve.launch.render.layout import Sizes, layout_of
from tests.e2e.conftest import DEADLINE
from tests.launch.test_render import pods

pytestmark = [pytest.mark.process, pytest.mark.long]
CLUSTER = """
micro_batches = 2
[model]
name = "nano"
[attention]
nodes = 1
tensor_parallel = 1
batch = 64
[experts]
nodes = 1
[[host]]
address = "attention-0.example"
role = "attention"
hardware = "cpu-host"
devices = 1
[[host]]
address = "experts-0.example"
role = "experts"
hardware = "cpu-host"
devices = 1
"""
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """The image's entry point, as `docker run` and a kubelet call it; what is left at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str, words: list[str], **env: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / f"{name}.log", "wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "afserve.launch.sites.container", *words],
                    stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **env},
                )
            )  # fmt: skip
        return started[-1]

    yield begin
    for one in started:
        if one.poll() is None:
            one.kill()
        one.wait(DEADLINE)


def probed(url: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """As a kubelet asks, until it answers well."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, url
        meanwhile()
        time.sleep(0.2)


def test_the_pods_of_the_manifests_serve_and_drain(tmp_path: Path, start: Start) -> None:
    """Only addresses, ports and the folder of the secrets are other ones."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    for name in ("token", "api.key", "admin.key"):
        (tmp_path / name).write_text(f"secret-{name}\n")
        (tmp_path / name).chmod(0o600)
    cluster = read_cluster(tmp_path / "cluster.toml", placeholders=True)
    site = layout_of(cluster, Sizes(cpus=1, memory=1), certs=False)
    files = manifests(site, KubernetesSettings())
    found = [one for name, some in files.items() if name != "kustomization.yaml" for one in some]
    ports = {name: free_port() for name in ("controller", "gateway")}
    nodes = free_port()

    def words(name: str, box: dict[str, Any]) -> list[str]:
        replaced = [
            word.replace(f"$(POD_IP):{7700}", f"127.0.0.1:{nodes}")
            .replace("controller:7700", f"127.0.0.1:{nodes}")
            .replace(RUN, str(tmp_path))
            .replace("0.0.0.0", "127.0.0.1")
            for word in box["args"]
        ]
        return [str(ports[name]) if word == "8000" else word for word in replaced]

    boxes = {name: pod["containers"][0] for name, pod in pods(found).items()}
    counts = {
        one["metadata"]["name"]: one["spec"]["replicas"] for one in found if "replicas" in one.get("spec", {})
    }
    env = {e["name"]: e.get("value", "127.0.0.1") for e in boxes["controller"]["env"]} | {
        "HOME": str(tmp_path)
    }

    def begin(name: str) -> subprocess.Popen[bytes]:
        role = name.partition("-")[0]
        return start(name, words(role, boxes[role]), **env)

    names = [f"{name}-{n}" for name in counts for n in range(1 if name == "gateway" else counts[name])]
    running = {name: begin(name) for name in names}

    def restart() -> None:
        """As a kubelet does with what has ended."""
        for name, process in running.items():
            if process.poll() is not None:
                running[name] = begin(name)

    for name, port in ports.items():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            probed(f"http://127.0.0.1:{port}{boxes[name][probe]['httpGet']['path']}", restart)
    url, key = f"http://127.0.0.1:{ports['gateway']}", {"Authorization": "Bearer secret-api.key"}
    body = {"prompt": "def main():", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401

    # A pod of the gateways goes while a stream is under way: the stream ends as it should, then the process.
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=DEADLINE) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        running["gateway-0"].send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert "error" not in first and rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
    assert running["gateway-0"].wait(DEADLINE) == 0

    running["controller-0"].send_signal(signal.SIGTERM)
    assert [one.wait(DEADLINE) for one in running.values()] == [0] * len(running)


def runs(process: "subprocess.Popen[bytes]", log: Path) -> None:
    assert process.poll() is None, log.read_text()


def test_without_arguments_it_serves_everywhere_with_a_key_that_it_keeps(
    tmp_path: Path, start: Start
) -> None:
    port = free_port()
    env = {"AFSERVE_STATE": str(tmp_path), "AFSERVE_PORT": str(port), "HOME": str(tmp_path)}
    for time_of in ("first", "second"):
        process, log = start(time_of, [], **env), tmp_path / f"{time_of}.log"
        probed(f"http://127.0.0.1:{port}/ready", partial(runs, process, log))
        printed = log.read_text()
        key = (tmp_path / "api.key").read_text().strip()
        assert printed.count(key) == (time_of == "first")
        body = {"prompt": "def main():", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body).status_code == 401
        assert httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
