"""Processes that are stopped for a while, as by Ctrl-Z or a paused virtual machine: who was asleep accuses nobody."""

import json
import signal
import threading
import time

import httpx
import psutil
import pytest

from afserve.control.membership.recovery import PATIENCE_SECONDS
from tests.e2e.streams import ENDLESS

pytestmark = [pytest.mark.process, pytest.mark.alone]
# Drawn, since greedy tokens are guessed by drafts: 900 of them take a fifth of a second then.
ASK = {**ENDLESS, "prompt": "import os\n", "temperature": 1, "max_tokens": 900}


class Reader(threading.Thread):
    """One stream, read to its end in the background."""

    def __init__(self, server, tokens=ASK["max_tokens"]):
        super().__init__(daemon=True)
        self.tokens = tokens
        self.url, self.text, self.pieces, self.failure = server.url, "", 0, ""
        self.done = False

    def run(self):
        body = {**ASK, "max_tokens": self.tokens}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=180) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    body = json.loads(line[6:])
                    self.failure = self.failure or str(body.get("error", ""))
                    self.text += "".join(choice["text"] for choice in body.get("choices", ()))
                    self.pieces += 1


def begin(server, tokens=ASK["max_tokens"]):
    reader = Reader(server, tokens)
    reader.start()
    until = time.monotonic() + 60
    while reader.pieces < 3:
        assert time.monotonic() < until and reader.is_alive(), "no stream"
        time.sleep(0.005)
    return reader


def end(reader):
    reader.join(120)
    assert not reader.is_alive() and reader.done and not reader.failure, reader.failure
    return reader.text


def pause(processes, seconds):
    """All of them at once; the children first, so that no parent sees one stopped."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    for process in reversed(processes):
        process.send_signal(signal.SIGCONT)


def run_through(server, processes, seconds, undisturbed):
    text = undisturbed(server)
    reader = begin(server)
    pause(processes, seconds)
    assert end(reader) == text
    after = end(begin(server, 100)).rstrip("\ufffd")
    assert after and text.startswith(after)
    assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.fixture(scope="module")
def undisturbed():
    """The text where nothing happens: the same from every deployment, so it is asked once."""
    known = []

    def text_of(server):
        if not known:
            known.append(end(begin(server)))
        return known[0]

    return text_of


LENGTHS = [1, pytest.param(20, marks=pytest.mark.long), pytest.param(60, marks=pytest.mark.long)]


@pytest.mark.parametrize("seconds", LENGTHS)
def test_the_gateway_alone(shared_up, seconds, undisturbed):
    server = shared_up("--experts", "2")
    run_through(server, [psutil.Process(server.process.pid)], seconds, undisturbed)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_every_process_together(shared_up, seconds, undisturbed):
    server = shared_up("--experts", "2")
    run_through(server, list(reversed(server.family())), seconds, undisturbed)


@pytest.mark.parametrize("name", [pytest.param("attention-0", marks=pytest.mark.long), "expert-1"])
def test_one_node_for_less_than_the_patience_of_a_run_that_ends_with_a_loss(up, name, undisturbed):
    server = up("--experts", "2", "--on-loss", "end")
    run_through(server, [psutil.Process(server.status()[name])], 3, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention-0", "expert-1"])
def test_one_node_for_longer_ends_the_run_and_is_named(up, name):
    server = up("--experts", "2", "--on-loss", "end")
    pid = server.status()[name]
    begin(server)
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code, printed = server.wait()
    assert code == 1 and f"{name}: silent for" in printed
    assert time.monotonic() - began < PATIENCE_SECONDS + 30
