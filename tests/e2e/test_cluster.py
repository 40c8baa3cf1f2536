"""`afserve up --cluster FILE`: a plan started as it is, and nodes on two hosts that are network namespaces."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from afserve.clock import MonotonicClock
from afserve.config import ModelSource
from afserve.control.controller import Controller
from afserve.errors import ConfigError
from afserve.families.table import load_spec
from afserve.launch.plan.hosts import own_addresses
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from tests.arrows import backwards
from tests.e2e.names import children_named, named
from tests.e2e.streams import ENDLESS
from tests.warm.interpreter import WARM, Forked

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0
ASK = {"model": "nano", "prompt": "import os\n", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CLUSTER = """
micro_batches = 2
[model]
name = "nano"
[attention]
nodes = 1
tensor_parallel = 1
batch = 64
[experts]
nodes = 2
[[host]]
address = "{attention}"
role = "attention"
hardware = "cpu-host"
devices = 1
[[host]]
address = "{experts}"
role = "experts"
hardware = "cpu-host"
devices = 2
"""


def said_by(*args: str) -> tuple[int, str]:
    done = WARM.said(*args)
    return done.returncode, done.stderr


def text_of(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=DEADLINE)
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("pool", ["cpu-host=2", "h200=8"])
def test_a_plan_that_fits_one_machine_names_it(tmp_path: Path, pool: str):
    file = tmp_path / "cluster.toml"
    code, said = said_by(
        "plan", "--model", "nano", "--pool", pool, "--context", "512", "--cluster", str(file)
    )
    assert code == 0, said
    assert 'address = "127.0.0.1"' in file.read_text() and ".example" not in file.read_text()


def test_a_plan_is_started_as_it_is(up, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    plan = ("plan", "--model", "nano", "--pool", "cpu-host=2", "--context", "512", "--cluster", str(file))
    assert said_by(*plan)[0] == 0
    server = up("--cluster", str(file))
    assert len(text_of(server.url)) > 0
    assert server.stop()[0] == 0


def test_attention_and_experts_here(up, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(attention="127.0.0.1", experts="localhost"))
    server = up("--cluster", str(file), "--experts", "2", "--kv-tokens", "8192")
    assert set(server.status()) == {"attention-0", "expert-0", "expert-1"}
    assert len(text_of(server.url)) > 0
    code, printed = server.stop()
    assert code == 0
    assert "shm, m = 2" in printed and "afserve node" not in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--attention", "3"),
            "--attention 3: {file} has attention.nodes = 1; drop the flag or edit the file",
        ),
        (("--colocated",), "--colocated: {file} has experts.nodes = 2"),
        (("--model", "qwen"), "--model qwen: {file} has model = nano"),
        (("--micro-batches", "auto"), "--micro-batches auto: {file} has micro_batches = 2"),
        (("--device", "cuda:0"), "--device cuda:0: {file} has host.hardware = cpu-host"),
        (("--listen", "127.0.0.1"), "--listen 127.0.0.1: every host of {file} is this machine"),
    ],
)
def test_a_flag_that_contradicts_the_file_is_one_error(
    refused, tmp_path: Path, flags: tuple[str, ...], said: str
):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(attention="127.0.0.1", experts="localhost"))
    code, printed = refused("--cluster", str(file), *flags)
    assert code == 2
    assert printed.startswith("error: " + said.format(file=file)) and printed.count("\n") == 1


def test_listen_without_a_cluster_is_refused():
    assert said_by("up", "--port", "0", "--listen", "127.0.0.1")[0] == 2


def test_a_taken_port_for_nodes_is_said(capfd: pytest.CaptureFixture[str]):
    folder = CONFIGS / "nano"
    run = choose(load_spec(folder), ModelSource(str(folder), "nano"), this_machine(), Wishes(1, 1)).deployment

    async def listen(port: int) -> None:
        await Controller(run, "token", MonotonicClock()).start("127.0.0.1", port)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen for nodes on 127.0.0.1:{port}; is the port taken"
        ):
            asyncio.run(listen(port))


def test_hardware_that_is_not_here_names_the_host(refused, tmp_path: Path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has it")
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(attention="127.0.0.1", experts="localhost").replace("cpu-host", "h20"))
    code, printed = refused("--cluster", str(file))
    assert code == 2
    assert "host 127.0.0.1: h20 needs cuda:0" in printed and printed.count("\n") == 1


class Hosts:
    """Two network namespaces joined by a virtual cable; `start(host, ...)` runs afserve in one of them."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names = names
        self.addresses = ["10.213.8.1", "10.213.8.2"]
        self.folder = folder
        self.started: list[Forked] = []

    def inside(self, host: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *command]

    def start(self, host: int, log: str, *args: str) -> Forked:
        with open(self.folder / log, "wb") as file:
            process = WARM.run(args, file, network=f"/run/netns/{self.names[host]}")
        self.started.append(process)
        return process

    def printed(self, log: str) -> str:
        return (self.folder / log).read_text()

    def pids(self) -> list[str]:
        found = [
            subprocess.run(["ip", "netns", "pids", n], capture_output=True, text=True, check=False)
            for n in self.names
        ]
        return [pid for one in found for pid in one.stdout.split()]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8)")
    made = Hosts([f"afc{os.getpid() % 10000}{side}" for side in "ab"], tmp_path)
    first, second = made.names
    steps = [f"ip netns add {name}" for name in made.names]
    steps.append(f"ip link add v{first} netns {first} type veth peer name v{second} netns {second}")
    for name, address in zip(made.names, made.addresses):
        steps += [f"ip -n {name} addr add {address}/24 dev v{name}", f"ip -n {name} link set v{name} up"]
        steps.append(f"ip -n {name} link set lo up")
    works = all(
        subprocess.run(step.split(), capture_output=True, check=False).returncode == 0 for step in steps
    )
    try:
        if not works:
            pytest.skip("network namespaces cannot be made here")
        yield made
        for process in made.started:
            assert process.poll() is not None, "still running"
        assert not made.pids()
    finally:
        for process in made.started:
            process.kill()
            process.wait(DEADLINE)
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def wait_for(found: Callable[[], object], log: Callable[[], str]) -> None:
    until = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < until, log()
        time.sleep(0.1)


ANSWER = """
import json, sys, httpx
with httpx.Client(base_url=sys.argv[1], timeout=120) as client:
    print(client.post("/v1/completions", json=json.loads(sys.argv[2])).json()["choices"][0]["text"], end="")
"""


def test_experts_on_another_host(up, hosts: Hosts, tmp_path: Path):
    single = up("--attention", "1", "--experts", "2", "--micro-batches", "2")
    expected = text_of(single.url)
    assert single.stop()[0] == 0
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(attention=hosts.addresses[0], experts=hosts.addresses[1]))
    gateway = hosts.start(0, "up", "up", "--cluster", str(file), "--port", "8000", "--insecure-nodes")
    other = follow(hosts, gateway)
    wait_for(lambda: "ready in" in hosts.printed("up") or gateway.poll(), lambda: hosts.printed("up"))
    ask = hosts.inside(0, sys.executable, "-c", ANSWER, "http://127.0.0.1:8000", json.dumps(ASK))
    assert subprocess.check_output(ask, cwd=ROOT, text=True, timeout=DEADLINE) == expected
    assert listening(hosts, 0) == {"127.0.0.1", hosts.addresses[0]}
    assert listening(hosts, 1) == {hosts.addresses[1]}
    gateway.terminate()
    assert [process.wait(DEADLINE) for process in (gateway, other)] == [0, 0]
    assert "tcp, m = 2" in hosts.printed("up")


def follow(hosts: Hosts, gateway: Forked) -> Forked:
    """Do by hand what it says: copy the token, run the line."""
    command = re.compile(rf"^{re.escape(hosts.addresses[1])}:  afserve (host .*)$", re.MULTILINE)
    wait_for(lambda: command.search(hosts.printed("up")) or gateway.poll(), lambda: hosts.printed("up"))
    copied = re.search(r"^here:  scp -p (\S+) \S+:(\S+)$", hosts.printed("up"), re.MULTILINE)
    assert copied is not None, hosts.printed("up")
    token = hosts.folder / copied[2]
    shutil.copy2(copied[1], token)
    assert token.stat().st_mode & 0o777 == 0o600
    (line,) = command.findall(hosts.printed("up"))
    return hosts.start(1, "host", *line.replace(copied[2], str(token)).split())


def listening(hosts: Hosts, host: int) -> set[str]:
    found = subprocess.check_output(hosts.inside(host, "ss", "-Hltn"), text=True)
    return {
        line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for line in found.splitlines()
    }


def test_a_node_elsewhere_that_dies_is_named(hosts: Hosts, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(attention=hosts.addresses[0], experts=hosts.addresses[1]))
    flags = ("--port", "8000", "--on-loss", "end", "--insecure-nodes")
    gateway = hosts.start(0, "up", "up", "--cluster", str(file), *flags)
    other = follow(hosts, gateway)
    wait_for(lambda: "ready in" in hosts.printed("up") or gateway.poll(), lambda: hosts.printed("up"))
    os.kill(node_of(other, "expert-1"), signal.SIGKILL)
    assert gateway.wait(DEADLINE) == 1
    assert "error: expert-1" in hosts.printed("up")
    assert other.wait(DEADLINE) == 1
    assert "expert-1: its process was killed by SIGKILL" in hosts.printed("host")


def test_a_trace_of_two_hosts_is_one_file_with_what_a_killed_node_sent(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, out = tmp_path / "cluster.toml", tmp_path / "trace.json"
    file.write_text(CLUSTER.format(attention=hosts.addresses[0], experts=hosts.addresses[1]))
    flags = ("--port", "8000", "--insecure-nodes", "--trace", str(out))
    with tempfile.TemporaryDirectory() as folder:  # short: sockets lie there too
        monkeypatch.setenv("TMPDIR", folder)
        gateway = hosts.start(0, "up", "up", "--cluster", str(file), *flags)
        other = follow(hosts, gateway)
        wait_for(lambda: "ready in" in hosts.printed("up") or gateway.poll(), lambda: hosts.printed("up"))
        ask = hosts.inside(0, sys.executable, "-c", ANSWER, "http://127.0.0.1:8000", json.dumps(ASK))
        first = subprocess.check_output(ask, cwd=ROOT, text=True, timeout=DEADLINE)
        sent = "afserve-trace-*/expert-1.0.sent"
        wait_for(lambda: list(Path(folder).glob(sent)), lambda: hosts.printed("up"))
        os.kill(node_of(other, "expert-1"), signal.SIGKILL)
        wait_for(lambda: "expert-1 lost" in hosts.printed("up"), lambda: hosts.printed("up"))
        assert subprocess.check_output(ask, cwd=ROOT, text=True, timeout=DEADLINE) == first
        gateway.terminate()
        assert [process.wait(DEADLINE) for process in (gateway, other)] == [0, 0], hosts.printed("up")
    here = socket.gethostname()
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn = {names[e["pid"]] for e in events if e["ph"] == "X"}
    nodes = ("attention-0", "expert-0", "expert-1")
    assert drawn >= {"gateway", *(f"{node} on {here}" for node in nodes)}
    assert backwards(out) == []
    assert any(e["ph"] == "i" and "expert-1 lost" in e["name"] for e in events)


def node_of(host: Forked, name: str) -> int:
    """The pid of a node that this `afserve host` carries."""
    (found,) = children_named(host.pid, name)
    return int(found.pid)


def test_ssh_starts_the_others_over_tls_and_a_killed_node_returns(issued, hosts: Hosts, tmp_path: Path):
    """A local program stands in for ssh: it is given the host and the line, and runs the line over there."""
    file, ssh, path = tmp_path / "cluster.toml", tmp_path / "ssh", tmp_path / "bin"
    file.write_text(CLUSTER.format(attention=hosts.addresses[0], experts=hosts.addresses[1]))
    path.mkdir()
    (path / "afserve").write_text(f'#!/bin/sh\nexec {sys.executable} -m afserve "$@"\n')
    inside = " ".join(hosts.inside(1, "sh", "-c"))
    ssh.write_text(
        f'#!/bin/sh\ntest "$1" = {hosts.addresses[1]} && exec env PATH={path}:$PATH {inside} "$2"\n'
    )
    for program in (ssh, path / "afserve"):
        program.chmod(0o755)
    certs = ("--certs", str(issued("controller", "gateway", "attention", "expert")))
    secured = ("--ssl-certfile", str(issued(addresses=("127.0.0.1",)) / "node.pem"))
    flags = ("--port", "8000", "--ssh", "--ssh-command", str(ssh), *certs, *secured)
    gateway = hosts.start(0, "up", "up", "--cluster", str(file), *flags)
    wait_for(lambda: "ready in" in hosts.printed("up") or gateway.poll(), lambda: hosts.printed("up"))
    assert "tcp, between hosts, over TLS" in hosts.printed("up")
    (forks,) = [p for name, p in named(psutil.Process(gateway.pid).children()) if name == "afserve-fork"]
    token = Path(os.readlink(f"/proc/{forks.pid}/fd/1")).with_name("token")
    shown = subprocess.check_output(["ps", "-eo", "args"], text=True)
    assert token.read_text() not in shown and f"--join {hosts.addresses[0]}" in shown
    (killed,) = children_named(gateway.pid, "expert-1")
    killed.kill()
    wait_for(lambda: [p for p in children_named(gateway.pid, "expert-1") if p != killed], lambda: "")
    ask = hosts.inside(0, sys.executable, "-c", ANSWER, "https://127.0.0.1:8000", json.dumps(ASK))
    trust = {**os.environ, "SSL_CERT_FILE": f"{Path(secured[1]).parent}/authority.pem"}
    assert len(subprocess.check_output(ask, cwd=ROOT, text=True, timeout=DEADLINE, env=trust)) > 10
    gateway.terminate()
    assert gateway.wait(DEADLINE) == 0
    assert "expert-1: its process was killed by SIGKILL" in hosts.printed("up")


@pytest.mark.slow
def test_copies_of_kv_travel_between_hosts_over_tls(issued, hosts: Hosts, tmp_path: Path):
    """Attention nodes on both hosts, which keep copies of each other's requests."""
    file = tmp_path / "cluster.toml"
    text = CLUSTER.format(attention=hosts.addresses[0], experts=hosts.addresses[0])
    text = text.replace("nodes = 1", "nodes = 2", 1)
    first = text[text.index("[[host]]") : text.rindex("[[host]]")]
    file.write_text(text + first.replace(hosts.addresses[0], hosts.addresses[1]))
    certs = ("--certs", str(issued("controller", "gateway", "attention", "expert")))
    flags = ("--port", "8000", "--kv-copies", "1", *certs)
    gateway = hosts.start(0, "up", "up", "--cluster", str(file), *flags)
    other = follow(hosts, gateway)
    wait_for(lambda: "ready in" in hosts.printed("up") or gateway.poll(), lambda: hosts.printed("up"))
    # A request is copied while it runs, a few times a second: this one takes seconds anywhere.
    asked = json.dumps({**ENDLESS, "prompt": "import os\n" * 40, "max_tokens": 1024, "stream": False})
    asks = [hosts.inside(0, sys.executable, "-c", ANSWER, "http://127.0.0.1:8000", asked)] * 2
    for ask in [subprocess.Popen(ask, cwd=ROOT, stdout=subprocess.DEVNULL) for ask in asks]:
        assert ask.wait(DEADLINE) == 0
    look = hosts.inside(0, "curl", "-s", "http://127.0.0.1:8000/metrics")

    def received() -> int:
        """Bytes, as attention nodes said with their last counters: those come a while after the copies."""
        said = subprocess.check_output(look, text=True, timeout=DEADLINE)
        return sum(map(int, re.findall(r"^afserve_kv_bytes_total.*received.* (\d+)", said, re.MULTILINE)))

    wait_for(received, lambda: hosts.printed("up") + hosts.printed("host"))
    assert not re.search("KV blocks was not made", hosts.printed("up") + hosts.printed("host"))
    gateway.terminate()
    assert [process.wait(DEADLINE) for process in (gateway, other)] == [0, 0]


def test_interrupted_while_it_waits_for_others(hosts: Hosts, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(attention=hosts.addresses[0], experts=hosts.addresses[1]))
    flags = ("--listen", f"{hosts.addresses[0]}:7700", "--insecure-nodes")
    gateway = hosts.start(0, "up", "up", "--cluster", str(file), *flags)
    missing = f"waiting for {hosts.addresses[1]}, which has not joined: expert-0, expert-1"
    wait_for(lambda: missing in hosts.printed("up"), lambda: hosts.printed("up"))
    gateway.terminate()
    assert gateway.wait(DEADLINE) == 0
    assert "waiting 300 s for 1 host:" in hosts.printed("up")
    assert "afserve host --join 10.213.8.1:7700" in hosts.printed("up")


def test_plain_text_to_other_hosts_has_to_be_asked_for(refused, tmp_path: Path):
    file = tmp_path / "cluster.toml"
    here = next(iter(own_addresses() - {"127.0.0.1", "::1"}), None)
    if here is None:
        pytest.skip("this machine has no address but loopback")
    file.write_text(CLUSTER.format(attention=here, experts="192.0.2.9"))
    code, printed = refused("--cluster", str(file))
    assert code == 2
    assert f"error: nodes on other hosts: {here} is beyond this machine" in printed
