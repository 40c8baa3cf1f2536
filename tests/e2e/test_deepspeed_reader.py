"""A node whose disk is read by DeepSpeed's process serves on when that is killed, with the same tokens."""

import logging
import random
import threading
import time

import psutil
import pytest

from afserve import LLM, SamplingParams
from afserve.comm.disk.reader import ReadQueue
from afserve.comm.disk.ways import Measured, Way, save
from tests.comm.readers import command_of

pytestmark = pytest.mark.process
SECONDS = 90.0


def readers():
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            found += [one] if "afserve.comm.disk.deepspeed_reader" in one.cmdline() else []
        except psutil.Error:
            continue
    return found


def wait(until):
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_its_process_is_killed_while_the_node_serves(tmp_path, monkeypatch, caplog):
    command_of("deepspeed", monkeypatch)
    caplog.set_level(logging.INFO, "afserve")
    save(tmp_path, Measured(Way(queue=ReadQueue(2, 256 << 10, 16)), 1e9))
    draw = random.Random(3)
    prompts = [[draw.randrange(10, 400) for _ in range(3000)] for _ in range(6)]
    settings = {
        "attention": 1,
        "experts": 1,
        "kv_ssd": str(tmp_path),
        "kv_tokens": 6000,
        "kv_ssd_size": "64MiB",
    }
    asked = SamplingParams(max_tokens=4, temperature=0.0)

    def answers(llm):
        found = [llm.generate([prompt], asked)[0] for prompt in prompts]
        return [answer.token_ids for answer in found], sum(answer.cached_tokens for answer in found)

    with LLM("nano", **settings) as llm:
        expected, _ = answers(llm)
    with LLM("nano", **settings) as llm:
        wait(readers)
        (process,) = readers()
        assert answers(llm) == (expected, 6 * 2992)
        killer = threading.Timer(0.05, process.kill)
        killer.start()
        while killer.is_alive() or process.is_running():
            assert answers(llm)[0] == expected
        assert answers(llm) == (expected, 6 * 2992) and not readers()
        wait(lambda: "is not read by DeepSpeed" in caplog.text)
    lines = [line for line in caplog.messages if "is not read by DeepSpeed's asynchronous I/O" in line]
    assert len(lines) == 1 and "ended by SIGKILL; this node reads it by 2 threads" in lines[0]
    assert not readers()
