"""The controller's process, the supervisor and everything but the nodes are killed: what goes on, and what is left."""

import json
import tempfile
import threading
import time

import httpx
import psutil
import pytest

from afserve.launch.processes import run_folder
from afserve.launch.processes.run_folder import RunFolder
from tests.e2e.streams import ENDLESS

pytestmark = pytest.mark.process
# Drawn, since greedy tokens are guessed by drafts: 900 of them take a fifth of a second then.
ASK = {**ENDLESS, "prompt": "import os\n", "temperature": 1, "max_tokens": 900}
SECONDS = 60.0
AFTER = 100  # tokens of a stream that shows that it is served again


class Reader(threading.Thread):
    """One stream, read to its end."""

    def __init__(self, server, tokens=ASK["max_tokens"]):
        super().__init__(daemon=True)
        self.tokens = tokens
        self.url, self.text, self.pieces, self.done, self.error = server.url, "", 0, False, ""

    def run(self):
        body = {**ASK, "max_tokens": self.tokens}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                self.done = self.done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    body = json.loads(line[6:])
                    self.error = self.error or str(body.get("error", ""))
                    self.text += "".join(choice["text"] for choice in body.get("choices", ()))
                    self.pieces += 1

    def begun(self):
        self.start()
        wait(lambda: self.pieces >= 3 or not self.is_alive())
        return self

    def ended(self):
        self.join(SECONDS)
        assert self.done and not self.error, self.error
        return self.text


@pytest.fixture(scope="module")
def undisturbed_one():
    """The text of a `Reader` where nothing happens: the same from every deployment."""
    known = []

    def text_of(server):
        if not known:
            known.append(Reader(server).begun().ended())
        return known[0]

    return text_of


def wait(condition):
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def lose_controller(server):
    """Returns once the next one says who is there."""
    lost = server.controller()
    lost.kill()
    wait(lambda: (found := server.controller()) is not None and found.pid != lost.pid)
    wait(lambda: seen(server) is not None)


def seen(server):
    """Node name -> pid, or None while nobody can say."""
    try:
        answer = httpx.get(f"{server.url}/status", timeout=SECONDS)
        ready = httpx.get(f"{server.url}/ready", timeout=SECONDS).status_code == 200
    except httpx.TransportError:
        return None
    if answer.status_code != 200 or not ready:
        return None
    return {node["name"]: node["pid"] for node in answer.json()["nodes"]}


def test_no_stream_breaks_while_controllers_are_lost_one_after_another(up, undisturbed_one):
    server = up("--attention", "2", "--experts", "2", "--gateways", "1")
    expected = undisturbed_one(server)
    nodes = server.status()
    readers = [Reader(server).begun() for _ in range(3)]
    for _ in range(2):
        lose_controller(server)
        assert server.status() == nodes  # the same processes
    assert [reader.ended() for reader in readers] == [expected] * 3
    assert expected.startswith(Reader(server, AFTER).begun().ended().rstrip("\ufffd"))
    assert server.stop()[0] == 0


@pytest.mark.long
def test_a_controller_and_a_gateway_that_stand_still_are_followed(up, undisturbed_one):
    server = up("--attention", "1", "--experts", "2", "--gateways", "2")
    expected = undisturbed_one(server)
    nodes = server.status()
    reader, frozen = Reader(server).begun(), server.controller()
    frozen.suspend()
    wait(lambda: (found := server.controller()) is not None and found.pid != frozen.pid)
    wait(lambda: seen(server) == nodes)
    assert reader.ended() == expected
    psutil.Process(nodes["gateway-1"]).suspend()
    wait(lambda: (seen(server) or nodes).get("gateway-1", nodes["gateway-1"]) != nodes["gateway-1"])
    assert expected.startswith(Reader(server, AFTER).begun().ended().rstrip("\ufffd"))
    assert server.stop()[0] == 0


def test_a_node_that_is_lost_with_the_controller_is_started_again(up, undisturbed_one):
    server = up("--attention", "1", "--experts", "2", "--gateways", "1")
    expected = undisturbed_one(server)
    before = server.status()
    reader = Reader(server).begun()
    psutil.Process(before["expert-1"]).kill()
    lose_controller(server)
    assert reader.ended() == expected
    wait(lambda: (seen(server) or before).get("expert-1", before["expert-1"]) != before["expert-1"])
    assert expected.startswith(Reader(server, AFTER).begun().ended().rstrip("\ufffd"))
    assert server.stop()[0] == 0


def test_nodes_go_on_when_controller_and_gateway_are_one_process(up, undisturbed_one):
    server = up("--attention", "1", "--experts", "2")
    expected = undisturbed_one(server)
    nodes = server.status()
    lose_controller(server)
    assert server.status() == nodes
    assert expected.startswith(Reader(server, AFTER).begun().ended().rstrip("\ufffd"))
    assert server.stop()[0] == 0


def test_by_the_rule_end_a_lost_controller_ends_the_run(up):
    server = up("--attention", "1", "--experts", "2", "--on-loss", "end")
    server.controller().kill()
    code, printed = server.wait()
    assert code == 1 and "the controller: its process was killed by SIGKILL" in printed


@pytest.mark.parametrize("gateways", ["0", "1"])
def test_nothing_is_left_of_stopped_processes_when_their_supervisor_is_killed(up, gateways):
    flags = () if gateways == "0" else ("--gateways", gateways)
    server = up("--attention", "1", "--experts", "2", *flags, cold=True)
    for process in psutil.Process(server.process.pid).children(recursive=True):
        process.suspend()
    server.process.kill()
    server.wait()  # the fixture looks for what is left


def test_all_that_is_left_when_all_is_killed_at_once_is_removed_by_the_next_run(up, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = up("--attention", "1", "--experts", "2", "--gateways", "1")
    folder, family = server.folder(), server.family()
    assert folder.is_relative_to(tmp_path)
    for process in family:
        process.suspend()
    for process in reversed(family):
        process.kill()
    psutil.wait_procs(family, SECONDS)
    assert folder.is_dir()
    monkeypatch.setattr(run_folder, "_YOUNG_SECONDS", -1.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    RunFolder().remove()
    assert not folder.exists()
