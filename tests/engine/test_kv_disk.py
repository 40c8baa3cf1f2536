"""Tokens over blocks that were on a disk meanwhile are those of blocks that stayed; the disk never holds anyone up."""

import threading
from dataclasses import replace

import pytest

from afserve.clock import FakeClock
from afserve.comm.disk.passes import Passes
from afserve.engine.scheduling.request import GenerationRequest
from tests.engine.driving import FAMILIES, collect, prompts, requests
from tests.engine.tiered import PATIENCE, Node, rest_of


@pytest.fixture(autouse=True, params=["one pass", "in place", "by copies"])
def placed(request, monkeypatch):
    """Whether files are read into the cache. The blocks of tests are small."""
    if request.param != "one pass":
        monkeypatch.setattr("afserve.comm.disk.passes.native_library", lambda: None)
    elif Passes.open(1000) is None:
        pytest.skip("the native library was not built")
    monkeypatch.setattr("afserve.engine.kv.disk.LEAST_PART", 1 if request.param == "in place" else 1 << 40)
    return request.param != "by copies"


@pytest.fixture
def node(tmp_path, tiny_checkpoint):
    opened = []

    def build(name="qwen3", **fields):
        opened.append(Node(tiny_checkpoint(name), tmp_path / "disk", **fields))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_tokens_over_restored_blocks_are_the_same(name, node, expected):
    """Memory holds one sequence only, so that each follow-up finds its blocks on the disk."""
    one, answers = node(name, kv_blocks=15), expected(name)
    for request, answer in zip(requests(prompts()), answers, strict=True):
        assert collect([replace(e, handle=0) for e in one.ask(request)])[0] == answer
    for request, answer in zip(requests(prompts()), answers, strict=True):
        events = one.ask(rest_of(request, answer, 10 + request.handle))
        assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
        found = sum(event.cached_tokens for event in events)
        assert found == (len(request.prompt_ids) + 39) // 8 * 8
    stats = one.stats()
    assert stats.restores >= 2 and stats.hit_tokens > 80 and not stats.restores_short
    assert stats.bytes_read == stats.hit_tokens // 8 * one.engine.kv.block_bytes
    assert not (stats.damaged or stats.late or stats.refused)


@pytest.mark.slow
def test_another_process_life_finds_the_store(node, expected):
    first, request, answer = node(), requests(prompts())[2], expected("qwen3")[2]
    first.ask(request)
    first.tiers.close()
    second = node()
    events = second.ask(rest_of(request, answer, 5))
    assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
    assert sum(e.cached_tokens for e in events) == 72 == second.stats().hit_tokens
    assert sum(e.found_below.disk for e in events) == 72, "whose key asked hears where it was"


def test_other_salts_and_other_models_find_nothing(node, tiny_checkpoint, tmp_path):
    one, request = node(), requests(prompts())[2]
    one.ask(request)
    one.forget()
    assert one.restore(replace(request, handle=1, cache_salt="another tenant")) is None
    other = Node(tiny_checkpoint("mixtral-window"), tmp_path / "disk")
    assert other.disk is not None and one.disk is not None
    assert other.restore(request) is None and other.disk.store.folder.parent != one.disk.store.folder.parent
    other.close()
    assert one.restore(request).received == {"disk": 4}


@pytest.mark.slow
def test_damaged_blocks_are_computed_again(node, expected):
    """A bit of the third block is another one: two come back, the rest is computed."""
    one, request, answer = node(), requests(prompts())[2], expected("qwen3")[2]
    one.ask(request)
    one.forget()
    path = one.disk.store.folder / "data"
    data = bytearray(path.read_bytes())
    names = one.engine.usable_names(request)
    slot, _ = one.disk.store._ring.find(names[2])
    data[slot * one.disk.store.kind.pitch + 11] ^= 4
    path.write_bytes(data)
    events = one.ask(replace(request, handle=1))
    assert collect([replace(e, handle=0) for e in events])[0] == answer
    assert sum(event.cached_tokens for event in events) == 16
    assert one.stats().damaged == 1 and one.stats().restores_short == 1
    one.forget()
    assert one.restore(request).received == {"disk": 4}  # it was written again


def test_a_restoration_ends_at_its_deadline_and_can_be_cancelled(node):
    first, request, clock = node(), requests(prompts())[2], FakeClock()
    first.ask(request)
    first.tiers.close()
    one = node(clock=clock, readers=0)  # nobody reads
    names = one.engine.usable_names(request)
    number = one.tiers.restore(names, 2.0)
    clock.advance(1.9)
    one.tiers.turn(0.0)
    assert one.tiers.busy and not one.tiers.ended
    clock.advance(0.1)
    one.tiers.turn(0.0)
    (ended,) = one.tiers.ended
    assert (ended.job, ended.asked, ended.received) == (number, {"disk": 4}, {})
    one.tiers.ended.clear()
    one.tiers.cancel(number)  # said late
    one.tiers.cancel(one.tiers.restore(names, 2.0))
    assert not one.tiers.busy and not list(one.engine.blocks.held)


def test_memory_that_a_reader_writes_to_is_held_until_it_has_ended(node, monkeypatch, placed):
    """Nobody else may get it, and what was put there is no number that anybody reads."""
    if not placed:
        pytest.skip("a buffer is written to")
    one, request = node(), requests(prompts())[2]
    one.ask(request)
    one.forget()
    assert one.disk.in_place and one.engine.blocks.part_bytes
    name = "fetch_parts" if one.disk.passes is None else "fetch_checked"
    begun, go_on, fetch = threading.Event(), threading.Event(), getattr(one.disk.store, name)

    def slowly(*asked):
        begun.set()
        assert go_on.wait(PATIENCE)
        return fetch(*asked)

    monkeypatch.setattr(one.disk.store, name, slowly)
    number = one.tiers.restore(one.engine.usable_names(request), PATIENCE)
    assert begun.wait(PATIENCE)
    one.tiers.cancel(number)
    held = list(one.engine.blocks.held)
    assert len(held) == 4 and one.tiers.busy
    go_on.set()
    one.wait(lambda: not one.tiers.busy)
    assert not list(one.engine.blocks.held)
    taken = one.engine.kv.pool.allocate(one.engine.kv.pool.available)
    assert not one.engine.kv.read(held).bytes_NY.any()
    one.engine.kv.pool.release(taken)


@pytest.mark.slow
def test_what_is_on_its_way_is_not_read_twice(node):
    first, request = node(), requests(prompts())[2]
    first.ask(request)
    first.tiers.close()
    one = node(readers=0)
    names = one.engine.usable_names(request)
    number = one.tiers.restore(names[:2], PATIENCE)
    assert one.tiers.restore(names, PATIENCE) == number
    one.tiers.cancel(number)
    another = one.tiers.restore(names, PATIENCE)
    assert another not in (None, number)
    one.tiers.cancel(another)
    assert not one.tiers._coming and not list(one.engine.blocks.held)


def test_what_came_is_held_until_the_turn_behind_its_end(node):
    """Nobody else takes the memory before whoever waited for it has found it."""
    one, request = node(), requests(prompts())[2]
    one.ask(request)
    one.forget()
    assert one.restore(request).received == {"disk": 4}
    held = list(one.engine.blocks.held)
    assert len(held) == 4 and one.tiers.busy
    one.tiers.turn(0.0)
    assert not list(one.engine.blocks.held) and not one.tiers.busy
    names = one.engine.usable_names(request)
    assert one.engine.kv.pool.match(names) == held


def test_a_chain_is_looked_up_in_parts(node, monkeypatch):
    monkeypatch.setattr("afserve.engine.kv.disk._BEGUN_BYTES", 1)  # one block at once
    one, request = node(), requests(prompts())[2]
    one.ask(request)
    one.forget()
    restored = one.restore(request)
    assert restored.asked == restored.received == {"disk": 4}


@pytest.mark.slow
def test_a_full_disk_ends_writing_and_nothing_else(node, expected):
    one, answers = node(spared=1 << 60, kv_blocks=15), expected("qwen3")
    for request, answer in zip(requests(prompts()), answers, strict=True):
        one.engine.submit(request)
        events = []
        while one.engine.busy:
            events += one.engine.step()
            one.tiers.turn(0.01)
        assert collect([replace(e, handle=0) for e in events])[0] == answer
        one.wait(lambda: one.tiers.settled)
    assert len(one.said) == 1 and "is not written" in one.said[0] and "are free" in one.said[0]
    assert one.stats().refused > 5 and not one.stats().blocks


def test_only_what_fits_is_restored(node):
    one, request = node(kv_blocks=15), GenerationRequest(0, prompts((100,))[0])
    request = replace(request, params=requests([(1,)])[0].params)
    one.ask(replace(request, params=replace(request.params, max_tokens=4)))
    one.forget()
    taken = one.engine.blocks.reserve(10, copies=False)
    assert one.restore(request).received == {"disk": 5}
    one.engine.blocks.release(taken)
