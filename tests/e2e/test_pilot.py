"""A pilot that acts on a real deployment: the load grows and falls, the pools follow, and no request notices."""

import re
import threading
import time

import httpx
import pytest

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.alone]
DEADLINE = 150.0
PROMPTS = tuple(f"def f{number}(x):\n" * 8 for number in range(10))


class Clients:
    """`busy` of them ask one request after another; the others wait."""

    def __init__(self, url, busy):
        self.url, self.busy = url, busy
        self.failed, self.texts = [], {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()

    def _ask(self, number):
        body = {"prompt": PROMPTS[number], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        while not self._stop.is_set():
            if number >= self.busy:
                self._stop.wait(0.1)
                continue
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
            if answer.status_code == 200:
                self.texts.setdefault(number, set()).add(answer.json()["choices"][0]["text"])
            else:
                self.failed.append(answer.text)
            self._stop.wait(0.02 if self.busy > 1 else 1.0)

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)


def wait_for(server, what):
    """The first status of which `what` is true."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        status = httpx.get(f"{server.url}/status", timeout=30).json()
        if what(status):
            return status
        time.sleep(0.5)
    raise AssertionError(f"{status['pilot']}; {server.printed()[-2000:]}")


def attention(status):
    return sum(node["role"] == "attention" and node["state"] == "ready" for node in status["nodes"])


def test_pools_follow_the_load_and_no_request_notices(up):
    flags = (
        "--attention",
        "1",
        "--experts",
        "2",
        "--pilot",
        "act",
        "--pilot-hold",
        "5",
        "--pilot-max",
        "attention=3",
    )
    server = up(*flags, "--log-level", "info")
    clients = Clients(server.url, busy=len(PROMPTS))
    try:
        grown = wait_for(server, lambda status: attention(status) > 1)
        clients.busy = 1
        fallen = wait_for(server, lambda status: attention(status) == 1)
        settled = wait_for(server, lambda status: status["pilot"]["counts"]["compared"] > 0)
    finally:
        clients.stop()
    assert clients.failed == []
    assert len(clients.texts) == len(PROMPTS) and all(len(texts) == 1 for texts in clients.texts.values())
    assert grown["pilot"]["mode"] == "act" and fallen["pilot"]["counts"]["acted"] >= 2
    assert settled["pilot"]["outcomes"] and not settled["lost"]
    metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    for name in ("advised_nodes", "rate", "compared_seconds", "advices_total"):
        assert f"\nafserve_pilot_{name}{{" in metrics
    assert re.search(r"advice \d+, \S+ to \S+, was followed: .*\(expected ", server.printed())
    assert server.stop()[0] == 0
