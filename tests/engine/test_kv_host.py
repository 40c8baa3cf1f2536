"""Tokens over blocks that were in host memory meanwhile are those of blocks that stayed; alone, and above a disk."""

from dataclasses import replace

import pytest
import torch

from afserve.clock import FakeClock
from afserve.comm.disk.passes import Passes
from afserve.engine.kv.host import HostArena
from tests.engine.driving import FAMILIES, collect, prompts, requests
from tests.engine.tiered import PATIENCE, Node, rest_of


@pytest.fixture(autouse=True, params=["native", "python"])
def one_pass(request, monkeypatch):
    """How blocks are copied and checked: in one pass of the native library, or step by step."""
    if request.param == "python":
        monkeypatch.setattr("afserve.comm.disk.passes.native_library", lambda: None)
    elif Passes.open(1000) is None:
        pytest.skip("the native library was not built")
    return request.param == "native"


@pytest.fixture
def node(tmp_path, tiny_checkpoint):
    opened = []

    def build(name="qwen3", *, disk=False, host_blocks=100, **fields):
        folder = tmp_path / "disk" if disk else None
        opened.append(Node(tiny_checkpoint(name), folder, host_blocks=host_blocks, **fields))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


def asked_again(one, answers):
    """Every prompt, then every follow-up, over a cache that holds one sequence. Events say what came from below it."""
    below = 0
    for request, answer in zip(requests(prompts()), answers, strict=True):
        events = one.ask(request)
        assert collect([replace(e, handle=0) for e in events])[0] == answer
        below += sum(event.found_below.host for event in events)
    for request, answer in zip(requests(prompts()), answers, strict=True):
        events = one.ask(rest_of(request, answer, 10 + request.handle))
        assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
        cached = sum(event.cached_tokens for event in events)
        assert cached == (len(request.prompt_ids) + 39) // 8 * 8
        below += sum(event.found_below.host for event in events)
    assert below == one.stats().host.hit_tokens


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_over_blocks_from_host_memory_are_the_same(name, block_size, node, expected):
    """Blocks of 8 lie in rows, those of 16 in tiles; a gated delta net's states lie in them too."""
    one, answers = node(name, kv_blocks=15 * 8 // block_size, block_size=block_size), expected(name)
    if block_size == 8:
        asked_again(one, answers)
    else:
        for handle in (0, 10, 20):
            for request, answer in zip(requests(prompts()), answers, strict=True):
                events = one.ask(replace(request, handle=handle + request.handle))
                assert collect([replace(e, handle=0) for e in events])[0] == answer
    stats = one.stats()
    assert stats.restores >= 2 and not stats.restores_short and not stats.host.damaged
    assert stats.host.hit_tokens > 30 and not stats.hit_tokens
    assert stats.host.bytes_read == stats.host.hit_tokens // block_size * one.engine.kv.block_bytes
    assert 0 < stats.host.blocks <= 100 and stats.host.bytes_written >= stats.host.bytes_read


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_host_memory_above_a_disk_finds_everything(name, node, expected):
    """Host memory has room for a part: what is not there comes from the disk, in one restoration."""
    one = node(name, disk=True, host_blocks=12, kv_blocks=15)
    asked_again(one, expected(name))
    stats = one.stats()
    assert stats.host.hit_tokens > 0 and stats.hit_tokens > 0 and stats.host.left > 0
    assert not (stats.damaged or stats.host.damaged or stats.restores_short)


@pytest.mark.slow
def test_a_restart_loses_host_memory_only(node, expected):
    first, request, answer = node(disk=True), requests(prompts())[2], expected("qwen3")[2]
    first.ask(request)
    first.forget()
    assert first.restore(replace(request, handle=1)).received == {"host": 4}
    first.tiers.close()
    second = node(disk=True)
    assert second.stats().blocks == first.stats().blocks and not second.stats().host.blocks
    events = second.ask(rest_of(request, answer, 5))
    assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
    assert second.stats().hit_tokens == 72 == sum(e.cached_tokens for e in events)
    third = node()
    assert third.restore(request) is None


def test_what_makes_room_goes_to_the_disk(node, monkeypatch, expected):
    """Here nothing is written before host memory lets it go."""
    one, answer = node(disk=True, host_blocks=4), expected("qwen3")[2]
    monkeypatch.setattr(one.disk_tier, "idle", lambda blocks: None)
    request = requests(prompts())[2]
    one.ask(request)
    one.forget(at_once=2)
    one.wait(lambda: one.tiers.settled)
    assert (one.stats().host.blocks, one.stats().host.left, one.stats().blocks) == (4, 8, 8)
    longer = rest_of(request, answer, 1)
    names = one.engine.usable_names(longer)
    assert one.tiers.look(names) == [("host", 4), ("disk", 5)], "the last of a chain leaves first"
    restored = one.restore(longer)
    assert restored.asked == restored.received == {"host": 4, "disk": 5}
    assert collect([replace(e, handle=0) for e in one.ask(longer)])[0] == answer[40:]
    assert not one.stats().late


@pytest.mark.slow
def test_damaged_memory_is_noticed_and_computed_again(node, expected):
    one, request, answer = node(), requests(prompts())[2], expected("qwen3")[2]
    one.ask(request)
    one.forget()
    names = one.engine.usable_names(request)
    (slot,) = one.host._slots.slots([names[2]])
    one.arena.rows_SY[slot, 11] ^= 4
    events = one.ask(replace(request, handle=1))
    assert collect([replace(e, handle=0) for e in events])[0] == answer
    assert sum(event.cached_tokens for event in events) == 16
    assert one.stats().host.damaged == 1 and one.stats().restores_short == 1
    one.forget()
    assert one.restore(request).received == {"host": 4}  # it was kept again


@pytest.mark.slow
def test_damaged_memory_is_not_given_to_the_disk(node, monkeypatch):
    one = node(disk=True, kv_blocks=15)
    monkeypatch.setattr(one.disk_tier, "idle", lambda blocks: None)
    request = requests(prompts())[2]
    one.ask(request)
    one.forget()
    names = one.engine.usable_names(request)
    (slot,) = one.host._slots.slots([names[0]])
    one.arena.rows_SY[slot, 11] ^= 4
    one.host._slots.capacity = one.host._slots._used  # it is full
    for other in requests(prompts())[:2]:
        one.ask(replace(other, handle=5 + other.handle))
        one.forget()
    one.wait(lambda: one.tiers.settled)
    assert one.stats().host.damaged == 1 and not one.disk.store.run(names[:1])


def test_other_salts_find_nothing(node):
    one, request = node(), requests(prompts())[2]
    one.ask(request)
    one.forget()
    assert one.restore(replace(request, handle=1, cache_salt="another tenant")) is None
    assert one.restore(request).received == {"host": 4}


def test_a_restoration_can_be_cancelled_and_ends_at_its_deadline(node):
    clock = FakeClock()
    one, request = node(clock=clock), requests(prompts())[2]
    one.ask(request)
    one.forget()
    names = one.engine.usable_names(request)
    number = one.tiers.restore(names, 2.0)
    assert one.tiers.restore(names, 2.0) == number and len(list(one.engine.blocks.held)) == 4
    one.tiers.cancel(number)
    assert not one.tiers.busy and not list(one.engine.blocks.held)
    one.check()
    assert one.tiers.restore(names, 2.0, most=3) == number + 1
    one.tiers.turn(0.0)
    (ended,) = one.tiers.ended
    assert ended.asked == ended.received == {"host": 3}
    one.tiers.ended.clear()
    one.tiers.turn(0.0)
    one.forget()
    one.tiers.restore(names, 2.0)
    clock.advance(2.0)
    one.host.next = lambda: None  # as if the turn had had no time
    one.tiers.turn(0.0)
    (ended,) = one.tiers.ended
    assert (ended.asked, ended.received) == ({"host": 4}, {})
    one.tiers.turn(0.0)
    assert not list(one.engine.blocks.held)
    one.check()


@pytest.mark.slow
def test_memory_for_a_restoration_pushes_nothing_of_it_out(node, expected):
    """The cache is full of others, which want the slots of host memory that are being read."""
    one, answers = node(host_blocks=9, kv_blocks=15), expected("qwen3")
    asked = requests(prompts())
    one.ask(asked[2])
    one.forget()
    one.ask(replace(asked[1], handle=5))
    assert one.engine.kv.pool.available == 15 and one.stats().host.blocks == 9
    wanted = rest_of(asked[2], answers[2], 6)
    assert one.tiers.look(one.engine.usable_names(wanted)) == [("host", 9)]
    restored = one.restore(wanted)
    assert restored.received == {"host": 9} and one.stats().host.blocks == 9
    assert collect([replace(e, handle=0) for e in one.ask(wanted)])[0] == answers[2][40:]


@pytest.mark.slow
def test_tokens_are_the_same_with_preemption(node, expected):
    """Three sequences at once over a cache for less than two, again and again."""
    one, answers = node(kv_blocks=18), expected("qwen3")
    for turn in range(3):
        one.forget()
        for request in requests(prompts()):
            again = replace(request, handle=10 * turn + request.handle)
            one.restore(again)
            one.engine.submit(again)
        events = []
        while one.engine.busy:
            events += one.engine.step()
            one.tiers.turn(0.01)
            one.check()
        assert collect([replace(e, handle=e.handle - 10 * turn) for e in events]) == answers
    assert one.engine.stats().preemptions and one.stats().host.hit_tokens


def test_an_arena_too_small_is_refused():
    with pytest.raises(OSError, match="4,096 bytes hold no block of 5,000"):
        HostArena(4096, 5000)
    with pytest.raises(OSError, match="cannot be had"):
        HostArena(1 << 62, 1 << 20)
    arena = HostArena(10_000, 1000)
    assert arena.slots == 10 and arena.rows_SY.shape == (10, 1000)
    arena.rows_SY[:] = torch.arange(10, dtype=torch.uint8)[:, None]
    assert arena.gathered([3, 4, 5]).data_ptr() == arena.rows_SY[3].data_ptr()
    assert arena.gathered([7, 2])[:, 0].tolist() == [7, 2] and bytes(arena.row(2)) == bytes([2] * 1000)
    arena.close()


def test_what_is_still_being_copied_is_waited_for(node, expected, one_pass):
    """As a GPU does it: the copy ends later, and until then the block has no checksum."""
    if one_pass:
        pytest.skip("a pass ends at once")
    one, request, answer = node(), requests(prompts())[2], expected("qwen3")[2]
    copy_out, copies = one.engine.blocks.copy_out, []

    class Copied:
        ended = waited = False

        def __init__(self, blocks, rows_NY):
            self.source, self.rows_NY = torch.empty_like(rows_NY), rows_NY
            copy_out(blocks, self.source)
            copies.append(self)

        def done(self):
            return self.ended

        def wait(self):
            self.rows_NY.copy_(self.source)
            self.ended = self.waited = True

    one.engine.blocks.copy_out = Copied
    one.ask(request)
    one.forget()
    assert copies and one.tiers.busy and not one.tiers.settled
    one.tiers.turn(0.0)
    assert not one.tiers.settled
    restored = one.restore(replace(request, handle=1))
    assert restored.received == {"host": 4} and all(copy.waited for copy in copies) and one.tiers.settled
    one.engine.submit(rest_of(request, answer, 3))
    said = []
    while one.engine.busy:
        said += one.engine.step()
    assert collect([replace(e, handle=0) for e in said])[0] == answer[40:]
    for copy in copies:
        copy.ended = True
    one.forget()
    copies[-1].wait()
    one.tiers.turn(PATIENCE)
    assert one.tiers.settled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_a_gpu_copies_to_pinned_memory_and_back(name, node):
    one = node(name, kv_blocks=15, device="cuda")
    assert one.arena.rows_SY.is_pinned()
    said: dict[int, list[int]] = {}
    for turn in range(2):
        for request in requests(prompts()):
            events = one.ask(replace(request, handle=10 * turn + request.handle))
            answer = collect([replace(e, handle=0) for e in events])[0]
            assert said.setdefault(request.handle, answer) == answer
    assert one.stats().host.hit_tokens > 30 and not one.stats().host.damaged
