"""Prompts that prefill nodes compute give the colocated engine's tokens, whatever happens to the hand-over."""

import json
from dataclasses import replace

import pytest

from afserve.clock import FakeClock, MonotonicClock
from afserve.comm.kv.puller import COMPLETE, Load, Pulled
from afserve.comm.kv.source import KvSource
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.moving.hand_over import HAND_OVER_SECONDS, MOST_AT_ONCE, HandOvers
from afserve.engine.kv.moving.prompt_place import PromptQueue, goes_straight
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, Tenant
from afserve.member import attention_life
from afserve.tracing.trace import KV_BLOCKS, Trace, merge
from tests.engine.driving import FAMILIES, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.scripted_kv import ScriptedEngine, ScriptedWire

ASKED = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True)
LENGTHS = (5, 41, 120, 150)
SMALL = {"max_batch_tokens": 32, "kv_blocks": 64}


@pytest.fixture(scope="module")
def alone(tiny_checkpoint):
    """The colocated engine's tokens, by family and parameters."""
    known = {}

    def tokens(name, params):
        if (name, params) not in known:
            node = colocated(ModelSource(str(tiny_checkpoint(name)), name), config(**SMALL))
            said: dict[int, list[int]] = {}
            for event in drive(node, requests(prompts(LENGTHS), params)):
                said.setdefault(event.handle, []).extend(event.token_ids)
            known[name, params] = said
        return known[name, params]

    return tokens


def phased(path, name, prefill, decode, experts, **fields):
    source = ModelSource(str(path), name)
    sizes = SMALL | {name: fields.pop(name) for name in ("kv_blocks", "kv_near_rows") if name in fields}
    cluster = LocalCluster.build(
        source, config(**sizes, micro_batches=2), attention=prefill + decode, experts=experts
    )
    return Phased(cluster, prefill, **fields)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_colocated_engine(name, shape, tiny_checkpoint, alone):
    world = phased(tiny_checkpoint(name), name, *shape)
    params = DRAWN if shape[0] == 2 else ASKED
    for request in requests(prompts(LENGTHS), params):
        at = request.handle
        prefill = world.prefilling[at % len(world.prefilling)]
        world.submit(request, prefill, world.decoding[at % len(world.decoding)])
    world.run()
    assert world.said == alone(name, params)
    assert world.cached == dict.fromkeys(range(4), 0), "what was computed for a request was not cached"
    stats = [end.moves.stats() for end in world.nodes]
    moved = sum(one.bytes_received for one in stats)
    assert moved == (40 + 112 + 144) // 8 * world.block_bytes, "all but the end came from prefill nodes"
    assert sum(one.handed for one in stats) == sum(one.prompts for one in stats) == 3
    assert not sum(one.handed_short for one in stats)


@pytest.mark.slow
def test_what_the_prefill_node_had_in_its_cache_was_cached(tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 2, 1)
    (prefill,), asked = world.prefilling, requests(prompts(LENGTHS), ASKED)
    for handle, decode in ((2, world.decoding[0]), (3, world.decoding[1])):
        world.submit(replace(asked[2], handle=handle), prefill, decode)
        world.run()
    assert world.cached == {2: 0, 3: 112}
    assert world.said == {2: alone("qwen3", ASKED)[2], 3: alone("qwen3", ASKED)[2]}
    assert [decode.moves.stats().handed for decode in world.decoding] == [1, 1]


def follow_up(world, handle, asked, most=30):
    """The prompt and its answer, and then some more."""
    more = tuple(7 + at % 50 for at in range(most))
    return replace(asked, handle=handle, prompt_ids=asked.prompt_ids + tuple(world.said[asked.handle]) + more)


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_what_the_decode_node_has_is_fetched_and_not_computed_again(
    anew, tiny_checkpoint, alone, monkeypatch
):
    """An answer was decoded there; with `anew` another prefill node is asked, which has nothing of the prompt."""
    monkeypatch.setattr("afserve.engine.kv.moving.prefilling.FETCHED_TOKENS", 8)
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 2, 1, 1)
    (first, second), (decode,) = world.prefilling, world.decoding
    asked = requests(prompts(LENGTHS), ASKED)[2]
    world.submit(asked, first, decode)
    world.run()
    after, prefill = follow_up(world, 9, asked), second if anew else first
    before = prefill.node.stats().dispatches
    world.submit(after, prefill, decode)
    world.run()
    known = (len(asked.prompt_ids) + 16 - 1) // 8
    fetched = known - (0 if anew else len(asked.prompt_ids) // 8)
    assert prefill.moves.stats().bytes_received == fetched * world.block_bytes
    node = colocated(ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), config(**SMALL))
    said = [token for event in drive(node, [after]) for token in event.token_ids]
    assert world.said[9] == said
    assert world.cached[9] == known * 8
    assert prefill.node.stats().dispatches - before == 3, (
        "two chunks of two layers, the last layer of the last only"
    )


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("rounds", range(1, 8))
@pytest.mark.parametrize("what", ["cancelled", "prefill", "decode"])
def test_a_fetch_may_be_interrupted(what, rounds, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("afserve.engine.kv.moving.prefilling.FETCHED_TOKENS", 8)
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 2, 2, 1)
    (first, second), (decode, other) = world.prefilling, world.decoding
    asked = requests(prompts(LENGTHS), ASKED)[2]
    world.submit(asked, first, decode)
    world.run()
    after = follow_up(world, 9, asked)
    world.submit(after, second, decode)
    for _ in range(rounds):
        world.round()
    if what == "cancelled":
        decode.moves.cancel(9)
        decode.node.cancel(9)
    else:
        world.lose(second if what == "prefill" else decode)
    if what == "decode":
        world.move(9, first, other)
    world.run()
    if what != "cancelled":
        node = colocated(ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), config(**SMALL))
        assert world.said[9] == [token for event in drive(node, [after]) for token in event.token_ids]


@pytest.mark.slow
def test_a_token_that_was_found_is_counted_once(tiny_checkpoint):
    """By the node that decodes, wherever it was."""
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 2, 1)
    (prefill,), asked = world.prefilling, requests(prompts(LENGTHS), ASKED)[2]
    for handle, decode in ((0, 0), (1, 0), (2, 1)):
        world.submit(replace(asked, handle=handle), prefill, world.decoding[decode])
        world.run()
    found = [end.node.stats(end.moves.stats()) for end in world.nodes]
    assert [one.prefix_queries for one in found] == [0, 240, 120]
    assert [one.hits["memory"] for one in found] == [0, 112, 0]
    assert [one.hits["peer"] for one in found] == [0, 0, 112]


@pytest.mark.slow
def test_blocks_come_while_the_prompt_is_still_computed(tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1)
    (prefill,), (decode,) = world.prefilling, world.decoding
    world.submit(requests(prompts(LENGTHS), ASKED)[3], prefill, decode)
    early = False
    while not decode.moves.stats().handed:
        world.round()
        early = early or (prefill.node.queued_tokens > 0 and decode.moves.stats().bytes_received > 0)
    assert early
    world.run()
    assert world.said[3] == alone("qwen3", ASKED)[3]


def test_the_first_token_is_drawn_from_the_row_of_the_prefill_node(tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1)
    (prefill,), (decode,) = world.prefilling, world.decoding
    request = requests(prompts(LENGTHS), replace(ASKED, max_tokens=1))[3]
    world.submit(request, prefill, decode)
    world.run()
    assert world.said[3] == alone("qwen3", ASKED)[3][:1]
    assert decode.node.stats().dispatches == 0 and prefill.node.stats().dispatches > 0


def test_a_prompt_begins_in_the_turn_that_hears_of_it(tiny_checkpoint):
    """An idle node looks again after 5 ms only."""
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1)
    (prefill,), (decode,) = world.prefilling, world.decoding
    world.submit(requests(prompts(LENGTHS), ASKED)[3], prefill, decode)
    decode.moves.turn()
    for link in world.links:
        world.deliver(link, 0)
        world.deliver(link, 0)
    prefill.moves.turn()
    assert prefill.node.busy


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_faulty_wires_cost_no_token(seed, tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("v3"), "v3", 2, 1, 1, seed=seed, faulty=0.3)
    for request in requests(prompts(LENGTHS), ASKED):
        world.submit(request, world.prefilling[request.handle % 2], world.decoding[0])
    while world.busy:
        world.round()
    assert world.said == alone("v3", ASKED)


@pytest.mark.slow
def test_nodes_with_little_memory_wait_and_preempt(tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1, kv_blocks=24)
    for request in requests(prompts(LENGTHS), ASKED):
        world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    assert world.said == alone("qwen3", ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4, 9])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_either_side_may_be_lost_in_the_middle(side, after, tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("mixtral-window"), "mixtral-window", 1, 2, 2)
    (prefill,), (decode, other) = world.prefilling, world.decoding
    for request in requests(prompts(LENGTHS), ASKED):
        world.submit(request, prefill, decode)
    for _ in range(after):
        world.round()
    world.lose(prefill if side == "prefill" else decode)
    if side == "decode":
        for handle in list(world.asked):
            if len(world.said[handle]) < ASKED.max_tokens:
                world.move(handle, prefill, other)
    world.run()
    assert world.said == alone("mixtral-window", ASKED)


def test_a_request_that_was_cancelled_ends_at_both(tiny_checkpoint):
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1)
    (prefill,), (decode,) = world.prefilling, world.decoding
    world.submit(requests(prompts(LENGTHS), ASKED)[3], prefill, decode)
    while not prefill.node.busy:
        world.round()
    decode.moves.cancel(3)
    world.run()
    assert world.said[3] == [] and prefill.moves.stats().prompts == 0


@pytest.mark.slow
def test_tenants_find_their_own_blocks_only(tiny_checkpoint, alone):
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1)
    prompt = prompts(LENGTHS)[2]
    for handle, salt in enumerate(("a", "b")):
        request = GenerationRequest(handle, prompt, ASKED, cache_salt=salt)
        world.submit(request, world.prefilling[0], world.decoding[0])
        world.run()
        assert world.decoding[0].moves.stats().handed == handle + 1, "the other tenant's are not found"
    assert world.said == {0: alone("qwen3", ASKED)[2], 1: alone("qwen3", ASKED)[2]}


# ---- which prompts go straight


def test_a_short_prompt_goes_straight_where_that_is_sooner():
    idle, loaded = PromptQueue(0, 1000.0), PromptQueue(4000, 1000.0)
    assert goes_straight(100, 256, idle, idle, 0.01), "a transfer costs more than none"
    assert not goes_straight(257, 256, idle, idle, 0.01), "it would hold up those who decode"
    assert not goes_straight(100, 256, loaded, idle, 0.01)
    assert goes_straight(100, 256, loaded, PromptQueue(5000, 1000.0), 0.01)
    slow = PromptQueue(0, 100.0)
    assert not goes_straight(100, 256, slow, idle, 0.5) and goes_straight(100, 256, slow, idle, 0.95)
    assert goes_straight(100, 256, PromptQueue(0, 0.0), idle, 0.01), "taken to be as fast as the other"
    assert not goes_straight(100, 256, idle, None, 0.01) and not goes_straight(9, 256, idle, slow_start(), 0)


@pytest.mark.slow
def test_a_hand_over_is_drawn_as_one_in_the_time_of_the_nodes(tiny_checkpoint, tmp_path):
    """Deadlines of hand-overs go by another clock, which skips pauses: here it is years behind."""
    world = phased(tiny_checkpoint("v3"), "v3", 1, 1, 1)
    traces = [Trace(f"attention-{end.index}") for end in world.nodes]
    for end, trace in zip(world.nodes, traces, strict=True):
        end.node.trace = trace
    before = MonotonicClock().now()
    for request in requests(prompts(LENGTHS), ASKED):
        world.submit(request, *world.nodes)
    world.run()
    after = MonotonicClock().now()
    for trace in traces:
        drawn = [(start, end) for track, _, start, end, _ in trace.slices if track == KV_BLOCKS]
        assert drawn and all(before - world.clock.now() <= start <= end <= after for start, end in drawn)
        trace.write(tmp_path / f"{trace.process}.trace")
    merge(list(tmp_path.glob("*.trace")), tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    arrows = [event for event in events if event["ph"] in "stf"]
    moved = {event["id"] for event in arrows if event["id"].startswith("prompt ")}
    assert moved and {e["name"] for e in arrows if e["id"] in moved} == {"KV hand-over"}
    assert {e["name"] for e in arrows if e["id"] not in moved} == {"rows"}
    assert len({(e["cat"], e["name"]) for e in arrows}) == 2, "both ends of an arrow are called alike"


def slow_start():
    return PromptQueue(0, 0.0)


class Node(ScriptedEngine):
    room = 1000

    def usable_names(self, request):
        return [bytes([index]) * 16 for index in range((len(request.prompt_ids) - 1) // 16)]

    def has_room(self, names):
        return len(names) <= self.room


class Scripted(ScriptedWire):
    def __init__(self):
        super().__init__()
        self.pulls, self.loads = [], {}

    def pull(self, address, names, limit, **said):
        self.pulls.append((address, len(names), limit, said["prompt"]))
        return len(self.pulls)

    def cancel(self, transfer):
        self.pulls[transfer - 1] = None

    def load(self, address):
        return self.loads.get(address)


THERE = KvSource(attention_life(1, 0), 0, "unix:there", prefills=True)


def asked(handle, blocks=4):
    return GenerationRequest(handle, tuple(range(blocks * 16 + 3)), priority=2, cache_salt="x")


def test_a_queue_that_was_told_grows_shorter_with_time():
    node, exchange, clock = Node(), Scripted(), FakeClock(9.0)
    handing = HandOvers(node, exchange, clock, 16, 256, lambda line: None)
    assert handing.ask(asked(1), THERE, lambda blocks: 0.0), "nothing is known yet"
    exchange.loads["unix:there"] = Load(9.0, 1000, 100.0)
    node.queued_tokens = 500
    assert not handing.ask(asked(2), THERE, lambda blocks: 0.0) and handing.went_straight == 1
    clock.advance(5.1)
    assert handing.ask(asked(3), THERE, lambda blocks: 0.0), "490 tokens are left there by now"


def test_hand_overs_wait_for_room_and_not_for_ever():
    node, exchange, clock = Node(), Scripted(), FakeClock(9.0)
    handing = HandOvers(node, exchange, clock, 16, 0, lambda line: None)
    node.room = 3
    assert handing.ask(asked(1), THERE, lambda blocks: 0.0)
    assert handing.start() == [] and not exchange.pulls and handing.busy
    node.room = 4
    clock.advance(1.0)
    assert handing.start() == []
    ((address, blocks, limit, prompt),) = exchange.pulls
    assert (address, blocks, limit) == ("unix:there", 4, HAND_OVER_SECONDS - 1.0)
    assert (len(prompt.tokens), prompt.tail, prompt.request, prompt.priority, prompt.salt) == (
        67,
        3,
        1,
        2,
        "x",
    )
    node.room = 0
    assert handing.ask(asked(2), THERE, lambda blocks: 0.0)
    clock.advance(HAND_OVER_SECONDS)
    assert handing.start() == [asked(2)] and handing.short == 1
    came = handing.ended(Pulled(1, 0, 4, 2, 1, 10, 0.5, "it broke", known=1))
    assert came == replace(asked(1), cached_most=32, from_peer=16) and handing.short == 2
    assert handing.ended(Pulled(1, 0, 4, 4, 0, 10, 0.5, COMPLETE)) is None and not handing.busy


@pytest.mark.parametrize(("row", "taken"), [(bytes(8), bytes(8)), (bytes(9), b""), (b"", b"")])
def test_a_row_of_another_size_is_not_taken(row, taken):
    handing = HandOvers(Node(), Scripted(), FakeClock(), 16, 0, lambda line: None)
    handing.ask(asked(1), THERE, lambda blocks: 0.0)
    handing.start()
    came = handing.ended(Pulled(1, 0, 4, 4, 0, 10, 0.5, COMPLETE, row=row))
    assert came is not None and came.row == taken


def test_few_are_handed_over_at_once():
    node, exchange, clock = Node(), Scripted(), FakeClock(9.0)
    handing = HandOvers(node, exchange, clock, 16, 0, lambda line: None)
    for handle in range(MOST_AT_ONCE + 1):
        assert handing.ask(asked(handle), THERE, lambda blocks: 0.0)
    handing.start()
    assert len(exchange.pulls) == MOST_AT_ONCE
    handing.cancel(MOST_AT_ONCE)
    handing.cancel(0)
    handing.start()
    assert len(exchange.pulls) == MOST_AT_ONCE and exchange.pulls[0] is None


def test_a_short_prompt_does_not_wait_until_all_elder_long_ones_are_handed_over():
    node, exchange = Node(), Scripted()
    handing = HandOvers(node, exchange, FakeClock(), 16, 0, lambda line: None)
    for handle in range(MOST_AT_ONCE + 9):
        assert handing.ask(asked(handle, blocks=40), THERE, lambda blocks: 0.0)
    handing.start()
    assert handing.ask(asked(999, blocks=1), THERE, lambda blocks: 0.0)
    for transfer in (1, 2):
        handing.ended(Pulled(transfer, 0, 40, 40, 0, 10, 0.5, COMPLETE))
        handing.start()
    begun = [prompt.request for _, _, _, prompt in exchange.pulls]
    assert begun == [*range(MOST_AT_ONCE), 999, MOST_AT_ONCE]


def test_what_never_fits_or_would_wait_behind_too_many_is_the_schedulers():
    node, exchange, clock = Node(), Scripted(), FakeClock(9.0)
    handing = HandOvers(node, exchange, clock, 16, 0, lambda line: None, waiting=2)
    node.room, node.most_room = 0, 4
    assert not handing.ask(asked(1, blocks=5), THERE, lambda blocks: 0.0), "it would wait for ever"
    assert all(handing.ask(asked(handle), THERE, lambda blocks: 0.0) for handle in (2, 3))
    assert not handing.ask(asked(4), THERE, lambda blocks: 0.0)


@pytest.mark.slow
def test_a_tenant_that_floods_a_prefill_node_delays_another_by_its_share(tiny_checkpoint):
    """Its queue is on the decode node, where 64 prompts are under way at once, and on the prefill node."""
    world = phased(tiny_checkpoint("qwen3"), "qwen3", 1, 1, 1, kv_blocks=400)
    (prefill,), (decode,) = world.prefilling, world.decoding
    one = replace(ASKED, max_tokens=1)
    for handle, prompt in enumerate(prompts([80] * 90)):
        world.submit(GenerationRequest(handle, prompt, one, tenant=Tenant("a")), prefill, decode)
    for _ in range(3):
        world.round()
    world.submit(GenerationRequest(90, prompts([81])[0][1:], one, tenant=Tenant("b")), prefill, decode)
    while not world.said[90]:
        world.round()
    before = sum(bool(world.said[handle]) for handle in range(90))
    world.run()
    assert before < 45 and all(world.said.values())
