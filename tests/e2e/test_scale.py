"""Nodes that come, go and get new processes under load, over real processes: no request fails, no token changes."""

import threading
import time

import httpx
import psutil
import pytest

from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
PROMPTS = ("import os\n", "def main():\n", "class Stack:\n")
ADMIN = {"Authorization": "Bearer secret"}
PAUSE = 0.25  # seconds; some requests are under way at any moment


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("secret\n")
    path.chmod(0o600)
    return str(path)


class Load:
    """Greedy requests one after another from a few clients, until `stop`; PAUSE leaves the nodes that start a core."""

    def __init__(self, server, clients=3):
        self.server, self.answers = server, []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(PROMPTS[i],)) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, prompt):
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        while not self._stop.is_set():
            answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""
            self.answers.append((prompt, answer.status_code, text or answer.text))
            self._stop.wait(PAUSE)

    def more(self, count=6):
        """Waits until so many more have been answered."""
        wanted, until = len(self.answers) + count, time.monotonic() + 120
        while len(self.answers) < wanted:
            assert time.monotonic() < until, self.answers[-3:]
            time.sleep(0.02)

    def stop(self):
        """All answered with the same text for the same prompt."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert [answer for answer in self.answers if answer[1] != 200] == []
        assert len(set(self.answers)) == len({prompt for prompt, _, _ in self.answers})


def afserve(server, keys, *words):
    more = ("--url", server.url, "--admin-key-file", keys, "--timeout", "120")
    return WARM.said(*words, *map(str, more))


def nodes(server):
    found = httpx.get(f"{server.url}/status", headers=ADMIN, timeout=30).json()["nodes"]
    return {node["name"]: node["pid"] for node in found}


def test_nodes_come_and_go_under_load(up, keys):
    server = up(
        "--attention",
        "2",
        "--experts",
        "2",
        "--redundant-experts",
        "16",
        "--spare-slots",
        "0",
        "--admin-key-file",
        keys,
    )
    load = Load(server)
    load.more()
    for words, said in (
        (("scale", "--attention", "+1", "--experts", "3"), ("attention-2 serves", "expert-2 serves")),
        (("drain", "attention-0"), ("attention-0 has gone",)),
        (("scale", "--role", "expert-2=attention"), ("expert-2 has gone", "attention-0 serves")),
        (("scale", "--role", "attention-0=expert"), ("attention-0 has gone", "expert-2 serves")),
        (("scale", "--experts", "-1"), ("expert-2 has gone",)),
    ):
        done = afserve(server, keys, *words)
        assert done.returncode == 0 and all(each in done.stdout for each in said), done
        load.more()
    assert set(nodes(server)) == {"attention-1", "attention-2", "expert-0", "expert-1"}
    for path, body, said in (
        ("scale", {"experts": 1}, "room for"),
        ("scale", {"attention": "-2"}, "at least one"),
        ("scale", {"attention": 99}, "--most-attention"),
        ("scale", {"attention": 3, "experts": 99}, "there may be 32"),
        ("scale", {"gateways": 2}, "--gateways 1"),
        ("scale", {"experts": "many"}, "no number of nodes"),
        ("scale", {"expert": 1}, "not one of attention, experts, gateways"),
        ("drain", {"node": "attention-0"}, "none of this run's"),
        ("role", {"node": "expert-1", "role": "attention"}, "room for"),
    ):
        answer = httpx.post(f"{server.url}/admin/{path}", json=body, headers=ADMIN, timeout=30)
        assert answer.status_code in (400, 404) and said in answer.text
    assert len(nodes(server)) == 4, "all of a change is checked before any of it is begun"
    load.stop()
    assert server.stop()[0] == 0


def test_every_node_gets_a_new_process_under_load(up, keys):
    server = up("--attention", "2", "--experts", "2", "--redundant-experts", "32", "--admin-key-file", keys)
    before = nodes(server)
    load = Load(server)
    load.more()
    done = afserve(server, keys, "restart", "--all")
    assert done.returncode == 0, done
    load.more()
    after = nodes(server)
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
    assert not [pid for pid in before.values() if psutil.pid_exists(pid)]
    load.stop()
    assert server.stop()[0] == 0


def test_gateways_come_and_go(up, keys):
    server = up("--gateways", "1", "--admin-key-file", keys)
    assert afserve(server, keys, "scale", "--gateways", "3").returncode == 0
    assert {"gateway-0", "gateway-1", "gateway-2"} <= nodes(server).keys()
    assert afserve(server, keys, "scale", "--gateways", "1").returncode == 0
    assert "gateway-1" not in nodes(server)
    assert server.stop()[0] == 0


def test_restarting_what_nobody_can_stand_in_for_is_refused(up, keys):
    server = up("--attention", "1", "--experts", "1", "--on-loss", "end", "--admin-key-file", keys)
    done = afserve(server, keys, "restart", "expert-0")
    assert done.returncode == 2 and "no room for the experts of expert-0" in done.stderr
    done = afserve(server, keys, "restart", "attention-0")
    assert done.returncode == 0 and "requests wait while attention-0 restarts" in done.stdout
    assert server.stop()[0] == 0
