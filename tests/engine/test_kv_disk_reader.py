"""Tokens over blocks that another process read are those of blocks that stayed, also where that process is killed."""

import os
import signal
import threading
from dataclasses import replace

import pytest

from afserve.comm.disk.passes import Passes
from afserve.comm.disk.reader import ReadQueue
from afserve.comm.disk.ways import Way
from tests.comm.readers import KINDS, command_of
from tests.engine.driving import FAMILIES, collect, prompts, requests
from tests.engine.tiered import Node, rest_of

pytestmark = pytest.mark.process
WAY = Way(queue=ReadQueue(2, 4096, 4))


@pytest.fixture(params=["one pass", "by copies"])
def placed(request, monkeypatch):
    """How blocks come from the memory of both processes to the cache."""
    if request.param != "one pass":
        monkeypatch.setattr("afserve.comm.disk.passes.native_library", lambda: None)
    elif Passes.open(1000) is None:
        pytest.skip("the native library was not built")


@pytest.fixture(params=KINDS)
def command(request, monkeypatch):
    return command_of(request.param, monkeypatch)


@pytest.fixture
def node(tmp_path, tiny_checkpoint, placed, command):
    opened = []

    def build(name="qwen3", **fields):
        opened.append(Node(tiny_checkpoint(name), tmp_path / "disk", way=WAY, command=command, **fields))
        disk = opened[-1].disk
        assert disk is not None and disk._reader is not None
        assert disk._reader.wait_ready(), opened[-1].said
        return opened[-1]

    yield build
    for one in opened:
        one.close()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_over_restored_blocks_are_the_same(name, node, expected):
    one, answers = node(name, kv_blocks=15), expected(name)
    for request, answer in zip(requests(prompts()), answers, strict=True):
        assert collect([replace(e, handle=0) for e in one.ask(request)])[0] == answer
    for request, answer in zip(requests(prompts()), answers, strict=True):
        events = one.ask(rest_of(request, answer, 10 + request.handle))
        assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
        found = sum(event.cached_tokens for event in events)
        assert found == (len(request.prompt_ids) + 39) // 8 * 8
    stats = one.stats()
    assert stats.restores >= 2 and not stats.restores_short and not stats.damaged
    assert not one.said and one.disk._reader.ready


def test_tokens_are_the_same_where_it_is_killed_while_it_reads(node, expected):
    one, request, answer = node(), requests(prompts())[2], expected("qwen3")[2]
    one.ask(request)
    killer = threading.Timer(0.03, os.kill, (one.disk._reader._process.pid, signal.SIGKILL))
    killer.start()
    for turn in range(1000):
        one.forget()
        events = one.ask(rest_of(request, answer, 10 + turn))
        assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
        assert sum(event.cached_tokens for event in events) == 72
        if one.said and not killer.is_alive():
            break
    (line,) = one.said
    assert "ended by SIGKILL; this node reads it by 2 threads" in line
    stats = one.stats()
    assert not (stats.damaged or stats.unreadable or stats.restores_short)
