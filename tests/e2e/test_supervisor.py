"""The controller's process, the supervisor and everything but the nodes are killed: what goes on, and what is left."""

import json
import threading
import time

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.process, pytest.mark.alone]
ASK = {"prompt": "import os\n", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
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
    assert expected.startswith(Reader(server, AFTER).begun().ended())
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
    assert expected.startswith(Reader(server, AFTER).begun().ended())
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
    assert expected.startswith(Reader(server, AFTER).begun().ended())
    assert server.stop()[0] == 0


def test_nodes_go_on_when_controller_and_gateway_are_one_process(up, undisturbed_one):
    server = up("--attention", "1", "--experts", "2")
    expected = undisturbed_one(server)
    nodes = server.status()
    lose_controller(server)
    assert server.status() == nodes
    assert expected.startswith(Reader(server, AFTER).begun().ended())
    assert server.stop()[0] == 0


def test_by_the_rule_end_a_lost_controller_ends_the_run(up):
    server = up("--attention", "1", "--experts", "2", "--on-loss", "end")
    server.controller().kill()
    code, printed = server.wait()
    assert code == 1 and "the controller: its process was killed by SIGKILL" in printed


@pytest.mark.parametrize("gateways", ["0", "1"])
def test_nodes_end_by_themselves_when_all_else_is_killed(up, gateways):
    flags = () if gateways == "0" else ("--gateways", gateways)
    server = up("--attention", "1", "--experts", "2", *flags)
    family = server.family()
    for process in psutil.Process(server.process.pid).children():
        process.suspend()  # nobody is left to clean up for the others
    server.process.kill()
    for process in family[1:3]:
        if process.name() in ("afserve-fork", "afserve-control") and process.is_running():
            process.kill()
    server.wait()  # the fixture looks for what is left
