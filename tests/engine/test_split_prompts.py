"""Prompts that prefill nodes compute together give the colocated engine's tokens, whatever happens to a part."""

import random
from dataclasses import replace

import pytest

from afserve.comm.m2n.link import ExpertLink
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.step.shared_layers import Abandoned, SharedLayers
from tests.engine.driving import FAMILIES, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased

ASKED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LENGTHS = (5, 70, 141, 180)
SMALL = {"max_batch_tokens": 32, "prefill_tokens": 32, "kv_blocks": 64}
WITHIN = {2: 1.5, 3: 0.95}  # seconds, so that the longest prompt needs so many nodes
RATE = 100.0  # tokens per second that nodes are taken to compute; the 180 take 1.8 s at one node


@pytest.fixture(scope="module")
def alone(tiny_checkpoint):
    """The colocated engine's tokens, by family."""
    known = {}

    def tokens(name):
        if name not in known:
            node = colocated(ModelSource(str(tiny_checkpoint(name)), name), config(**SMALL))
            said: dict[int, list[int]] = {}
            for event in drive(node, requests(prompts(LENGTHS), ASKED)):
                said.setdefault(event.handle, []).extend(event.token_ids)
            known[name] = said
        return known[name]

    return tokens


def split(path, name, prefill=2, *, within=1.5, experts=1, sizes=None, **fields):
    """The longest prompt is late at one node, and in time at all of them."""
    sizes = SMALL | (sizes or {})
    cluster = LocalCluster.build(
        ModelSource(str(path), name), config(**sizes, micro_batches=2), attention=prefill + 2, experts=experts
    )
    world = Phased(cluster, prefill, **fields)
    world.within = within
    decode = world.decoding[0]
    for end in world.prefilling:
        end.node._meter.prompt_rate = RATE
        decode.exchange._puller.loads[decode.exchange._peer(end.address)] = world.load(RATE)
    return world


def ask(world, request, lead=0):
    others = tuple(end for end in world.prefilling if end is not world.prefilling[lead])
    world.submit(request, world.prefilling[lead], world.decoding[0], others)


def counts(world):
    stats = [end.moves.stats() for end in world.prefilling]
    return tuple(sum(getattr(one, name) for one in stats) for name in ("split", "split_short", "parts"))


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", [*FAMILIES, "late"])
def test_tokens_are_those_of_the_colocated_engine(name, parts, tiny_checkpoint, alone):
    world = split(tiny_checkpoint(name), name, parts, within=WITHIN[parts])
    ask(world, requests(prompts(LENGTHS), ASKED)[3])
    world.run()
    assert world.said[3] == alone(name)[3]
    assert counts(world) == (1, 0, parts - 1)
    assert world.cached[3] == 0


@pytest.mark.slow
@pytest.mark.parametrize("within", [WITHIN[2], 1.0])
def test_what_is_in_time_at_one_node_or_nowhere_is_computed_by_one(within, tiny_checkpoint, alone):
    world = split(tiny_checkpoint("qwen3"), "qwen3", within=2.5 if within == 1.0 else 0.3)
    ask(world, requests(prompts(LENGTHS), ASKED)[3])
    world.run()
    assert world.said[3] == alone("qwen3")[3] and counts(world) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [24, 31, 40, 64, 96])
def test_chunks_need_not_divide_the_prompt(chunk, tiny_checkpoint, alone):
    sizes = {"prefill_tokens": chunk, "max_batch_tokens": chunk}
    world = split(tiny_checkpoint("v3"), "v3", sizes=sizes)
    for request in requests(prompts(LENGTHS), ASKED)[2:]:
        world.within = len(request.prompt_ids) / RATE * 0.8
        ask(world, request)
        world.run()
        world.clock.advance(5.0)  # what was queued by then is not any more
    assert [world.said[at] for at in (2, 3)] == [alone("v3")[at] for at in (2, 3)]
    assert counts(world) == (2, 0, 2)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["qwen3", "v2-groups", "qwen3-next"])
@pytest.mark.parametrize("before", [(0,), (1,), (0, 1)])
def test_prefixes_that_are_in_a_cache_before(name, before, tiny_checkpoint, alone):
    """At the lead, at the other node, at both: the other one gets what it lacks of what the lead has."""
    world = split(tiny_checkpoint(name), name)
    request = requests(prompts(LENGTHS), ASKED)[3]
    for index in before:
        short = replace(request, handle=10 + index, prompt_ids=request.prompt_ids[:49])
        world.submit(short, world.prefilling[index], world.decoding[1])
        world.run()
    world.within = 1.2
    ask(world, request)
    world.run()
    assert world.said[3] == alone(name)[3]
    assert counts(world) == (1, 0, 1)
    assert world.cached[3] == (48 if 0 in before else 0)


@pytest.mark.slow
def test_two_prompts_with_a_lead_each_do_not_wait_for_each_other(tiny_checkpoint, alone):
    world = split(tiny_checkpoint("qwen3"), "qwen3", 3)
    for request in requests(prompts(LENGTHS), ASKED)[1:]:
        world.within = len(request.prompt_ids) / RATE * 0.8
        ask(world, request, lead=request.handle % 3)
    world.run()
    assert {at: world.said[at] for at in (1, 2, 3)} == {at: alone("qwen3")[at] for at in (1, 2, 3)}
    assert counts(world)[:2] == (3, 0)


@pytest.mark.slow
def test_more_nodes_hand_a_prompt_over_sooner(tiny_checkpoint):
    """In rounds of this world, ten of which a layer of a chunk takes at the expert nodes, whoever waits there."""
    took = {}
    for parts, within in ({1: 9.0} | WITHIN).items():
        world = split(tiny_checkpoint("qwen3"), "qwen3", max(2, parts), within=within)
        world.slow = 10
        ask(world, requests(prompts(LENGTHS), ASKED)[3])
        began = world.clock.now()
        while not world.said[3]:
            world.round()
        took[parts] = round((world.clock.now() - began) / 0.01)
        world.run()
    assert took[2] < 0.7 * took[1] and took[3] < 0.8 * took[2], took


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 8))])
def test_faulty_wires_cost_no_token(seed, tiny_checkpoint, alone):
    name = "v3" if seed % 2 else "qwen3"
    world = split(tiny_checkpoint(name), name, 3, within=WITHIN[3], seed=seed, faulty=0.1)
    for request in requests(prompts(LENGTHS), ASKED)[1:]:
        world.within = len(request.prompt_ids) / RATE * 0.6
        ask(world, request, lead=request.handle % 3)
    world.run()
    assert {at: world.said[at] for at in (1, 2, 3)} == {at: alone(name)[at] for at in (1, 2, 3)}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("after", [2, 4, 7, 10, 14, 19, 25])
@pytest.mark.parametrize(
    ("which", "name"), [("lead", "qwen3"), ("other", "qwen3"), ("decode", "qwen3"), ("other", "late")]
)
def test_a_node_may_be_lost_in_the_middle(which, name, after, tiny_checkpoint, alone):
    world = split(tiny_checkpoint(name), name, within=WITHIN[3], prefill=3)
    request = requests(prompts(LENGTHS), ASKED)[3]
    ask(world, request)
    for _ in range(after):
        world.round()
    lost = {"lead": world.prefilling[0], "other": world.prefilling[1], "decode": world.decoding[0]}[which]
    world.lose(lost)
    world.run()
    if which != "decode":
        assert world.said[3] == alone(name)[3]
    assert not any(end.node.busy for end in world.nodes if end.index not in world.lost)


@pytest.mark.slow
def test_rows_that_are_away_come_back_before_a_step_is_given_up(tiny_checkpoint, alone, monkeypatch):
    """Layer 1 adds the sums of layer 0, and the others' part of it does not come. A micro-batch has one dispatch under
    way at a time all the same."""
    come, dispatch, combine = SharedLayers.come, ExpertLink.dispatch, ExpertLink.combine
    lost: list[int] = []
    away: set[tuple[ExpertLink, int]] = set()

    def failing(layers, number):
        if number == 1 and not lost:
            lost.append(len(away))
            layers._shared.leave("made up")
            raise Abandoned("made up")
        return come(layers, number)

    def sending(link, *rows, layer, micro_batch):
        assert (link, micro_batch) not in away
        away.add((link, micro_batch))
        return dispatch(link, *rows, layer=layer, micro_batch=micro_batch)

    def adding(link, ticket):
        away.remove((link, ticket.micro_batch))
        return combine(link, ticket)

    for owner, name, does in (
        (SharedLayers, "come", failing), (ExpertLink, "dispatch", sending), (ExpertLink, "combine", adding)
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, does)
    world = split(tiny_checkpoint("late"), "late", experts=2)
    ask(world, requests(prompts(LENGTHS), ASKED)[3])
    world.run()
    assert lost and lost[0] and not away and world.said[3] == alone("late")[3]


@pytest.mark.parametrize("after", [1, 3, 6, 9, 12])
def test_an_abort_ends_it_everywhere(after, tiny_checkpoint):
    world = split(tiny_checkpoint("v3"), "v3", 3, within=WITHIN[3])
    ask(world, requests(prompts(LENGTHS), ASKED)[3])
    for _ in range(after):
        world.round()
    world.decoding[0].moves.cancel(3)
    world.run()
    assert not world.said[3] and counts(world)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [24, 26, 30, 36])
def test_nodes_with_little_memory_preempt_a_part(blocks, tiny_checkpoint, alone):
    """The lead, or the other one, has no room for a prompt that others compute too."""
    world = split(tiny_checkpoint("qwen3"), "qwen3", sizes={"kv_blocks": blocks})
    for request in requests(prompts(LENGTHS), ASKED):
        world.within = len(request.prompt_ids) / RATE * 0.8
        ask(world, replace(request, priority=-request.handle), lead=request.handle % 2)
    world.run()
    assert world.said == alone("qwen3")


@pytest.mark.slow
def test_a_node_that_says_nothing_more_is_waited_for_two_seconds(tiny_checkpoint, alone):
    """Its connections stand."""
    world = split(tiny_checkpoint("v3"), "v3")
    ask(world, requests(prompts(LENGTHS), ASKED)[3])
    while not world.prefilling[1].node.busy:
        world.round()
    world.lost.add(world.prefilling[1].index)
    began = world.clock.now()
    world.run()
    assert world.said[3] == alone("v3")[3] and counts(world)[:2] == (1, 1)
    assert world.clock.now() - began < 3


def schedule(seed, path, name):
    """Prompts with leads by chance, at nodes of any size, over wires of any kind; one node may be killed, or hang."""
    dice = random.Random(seed)
    nodes, chunk = dice.choice((2, 3, 4)), dice.choice((16, 32, 40, 64))
    sizes = {"kv_blocks": dice.choice((24, 32, 64)), "prefill_tokens": chunk, "max_batch_tokens": 64}
    faulty, experts = dice.choice((0.0, 0.02, 0.1, 0.3)), dice.choice((1, 2))
    world = split(path, name, nodes, sizes=sizes, experts=experts, seed=seed, faulty=faulty)
    waiting, lost = requests(prompts(LENGTHS), ASKED), nodes == 2
    for _ in range(4000):
        lead = dice.randrange(nodes)
        if waiting and dice.random() < 0.3 and world.prefilling[lead].index not in world.lost:
            request = waiting.pop()
            world.within = len(request.prompt_ids) / RATE * dice.choice((0.3, 0.6, 0.8))
            ask(world, replace(request, priority=dice.choice((0, 0, -1))), lead)
        if not lost and dice.random() < 0.03:
            lost, end = True, dice.choice(world.prefilling)
            if dice.random() < 0.7:
                world.lose(end)
            else:
                world.lost.add(end.index)
        world.round()
        if not (waiting or world.busy):
            break
    world.run()
    return world


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 400))]
)
def test_no_schedule_costs_a_token(seed, tiny_checkpoint, alone):
    name = FAMILIES[seed % len(FAMILIES)]
    world = schedule(seed, tiny_checkpoint(name), name)
    assert {at: world.said[at] for at in range(len(LENGTHS))} == alone(name)
