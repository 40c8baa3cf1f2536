"""A model with two groups of KV, of other block sizes, gives the tokens that it gives with one: through the prefix
cache, preemption, moves between nodes, copies, prompts that other nodes compute, host memory, disk, and drafts."""

from dataclasses import replace

import pytest

from afserve.comm.kv.split import SplitMember
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.groups import GroupKind, KvGroup
from afserve.engine.kv.moving.copying import Copier
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from tests.engine.driving import config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.test_kv_exchange import Pair
from tests.engine.tiered import Node
from tests.engine.told_drafts import tell_nodes

LENGTHS = (5, 41, 90, 120)
ASKED = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SMALL = {"max_batch_tokens": 32, "prefill_tokens": 32, "kv_blocks": 64}
STEP = 32


def windows(blocks, size, more):
    """Mixtral's layers see 20 tokens: here one keeps all of them, and two what they see, in blocks of half the size."""
    rows = -(-20 // size) + STEP // size + 2 + more
    return (
        KvGroup(GroupKind.FULL, (0,), blocks, size),
        KvGroup(GroupKind.WINDOW, (1, 2), 2 * rows, size // 2, window=20),
    )


def states(blocks, size, more):
    """Two layers with states beside one that sees all tokens."""
    return (
        KvGroup(GroupKind.FULL, (2,), blocks, size),
        KvGroup(GroupKind.STATE, (0, 1), STEP // size + 3 + more, size),
    )


def quarters(blocks, size, more):
    """Latent attention whose last layer has blocks of a quarter of the size, as the keys of an indexer may."""
    return (
        KvGroup(GroupKind.LATENT, (0, 1), blocks, size),
        KvGroup(GroupKind.INDEXED, (2,), 4 * blocks, size // 4),
    )


KINDS = {"mixtral-window": windows, "qwen3-next": states, "v3": quarters}


@pytest.fixture(params=KINDS, scope="module")
def family(request):
    return request.param


def grouped(family, made, more=6):
    """`more` blocks of the first group than one sequence needs have all that the second keeps."""
    return KINDS[family](made.kv_blocks, made.block_size, more)


def tokens_of(events):
    said: dict[int, list[int]] = {}
    for event in events:
        assert event.error is None
        said.setdefault(event.handle, []).extend(event.token_ids)
    return said


@pytest.fixture(scope="module")
def source(tiny_checkpoint, family):
    return ModelSource(str(tiny_checkpoint(family)), family)


@pytest.fixture(scope="module")
def alone(source):
    """What the model says with one group."""
    return tokens_of(drive(colocated(source, config(**SMALL)), requests(prompts(LENGTHS), ASKED)))


@pytest.fixture
def told(alone, monkeypatch):
    """Nodes draft some of what the model says, and some of what it does not."""
    texts = [(*prompt, *alone[handle]) for handle, prompt in enumerate(prompts(LENGTHS))]
    tell_nodes(monkeypatch, texts)


@pytest.fixture(params=["alone", "drafts"])
def build(source, family, request):
    if request.param == "drafts":
        request.getfixturevalue("told")

    def build(more=6, **fields):
        made = config(**SMALL | fields)
        return colocated(source, made, grouped(family, made, more))

    return build


@pytest.fixture
def cluster(source, family, told):
    def build(attention, experts=1, more=6, **fields):
        made = config(**SMALL | fields)
        groups = grouped(family, made, more)
        return LocalCluster.build(source, made, attention=attention, experts=experts, groups=groups)

    return build


def behind(request, said, handle, most=30):
    """The prompt and the first `most` tokens of its answer, as another request."""
    left = replace(request.params, max_tokens=len(said) - most)
    return GenerationRequest(handle, request.prompt_ids + tuple(said[:most]), left)


def test_prefixes_are_found_and_the_tokens_are_the_same(build, alone):
    node, asked = build(more=30), requests(prompts(LENGTHS), ASKED)
    assert tokens_of(drive(node, asked)) == alone
    for request in asked:
        events = drive(node, [behind(request, alone[request.handle], 10 + request.handle)])
        assert tokens_of(events) == {10 + request.handle: alone[request.handle][30:]}
        assert events[0].cached_tokens >= (len(request.prompt_ids) + 30) // 8 * 8 - 8, "its end was kept"
    drafts = node.stats().drafts
    assert 0 < drafts.accepted < drafts.tokens or not node._drafting


@pytest.mark.slow
def test_sequences_that_lost_their_blocks_are_computed_again(build, alone):
    node = build(more=2, kv_blocks=30)
    assert tokens_of(drive(node, requests(prompts(LENGTHS), ASKED))) == alone
    assert node.stats().preemptions


@pytest.mark.slow
def test_a_request_moves_with_its_blocks(cluster, alone):
    pair = Pair(3, cluster(2), 0.0)
    here, there = pair.nodes
    request = requests(prompts(LENGTHS), ASKED)[3]
    here.node.submit(request)
    said: list[int] = []
    while len(said) < 20:
        said += [token for event in pair.round() for token in event.token_ids]
    pair.move(replace(request, generated=tuple(said)), here, there)
    moved = []
    while there.node.busy:
        moved += pair.round()
    assert said + [token for event in moved for token in event.token_ids] == alone[3]
    assert moved[0].cached_tokens == (120 + len(said) - 1) // 8 * 8


def test_copies_are_gone_on_with(cluster, alone):
    world = Phased(cluster(2, micro_batches=2), 0)
    here, there = world.nodes
    copier = here.moves._copier = Copier(here.node, here.exchange, world.block_bytes, world.clock)
    here.moves.copy_to([SplitMember(0, there.address)])
    request = requests(prompts(LENGTHS), ASKED)[3]
    world.said[3], world.asked[3] = [], (request, here)
    here.node.submit(request)
    while len(world.said[3]) < 20 or copier.blocks < 15:
        world.round()
    world.lose(here)
    world.asked[3] = request, there
    world.cached.clear()
    there.node.submit(replace(request, generated=tuple(world.said[3])))
    world.run()
    assert world.said[3] == alone[3] and world.cached[3] >= 120


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("helpers", [0, 1])
def test_prompts_that_other_nodes_compute(cluster, alone, helpers):
    world = Phased(cluster(2 + helpers, experts=2, micro_batches=2), 1 + helpers)
    lead, *others = world.prefilling
    (decode,) = world.decoding
    if helpers:
        for end in world.prefilling:
            end.node._meter.prompt_rate = 100.0
            decode.exchange._puller.loads[decode.exchange._peer(end.address)] = world.load(100.0)
    for request in requests(prompts(LENGTHS), ASKED):
        world.submit(request, lead, decode, tuple(others))
    world.run()
    assert world.said == alone
    stats = decode.moves.stats()
    assert stats.handed == 3 and not stats.handed_short
    assert sum(end.moves.stats().split for end in world.prefilling) == helpers


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_the_wires(cluster, alone, seed):
    world = Phased(cluster(3, experts=2, micro_batches=2), 1, seed=seed, faulty=0.3)
    for request in requests(prompts(LENGTHS), ASKED):
        world.submit(request, world.prefilling[0], world.decoding[request.handle % 2])
    world.run()
    assert world.said == alone


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("below", ["host", "disk", "both"])
def test_blocks_come_back_from_below_the_cache(source, family, alone, told, tmp_path, below):
    made = config(**SMALL | {"kv_blocks": 24})
    folder = None if below == "host" else tmp_path
    node = Node(
        source.path,
        folder,
        host_blocks=0 if below == "disk" else 12 if below == "both" else 100,
        groups=grouped(family, made),
        limit=4 << 20,
        **SMALL | {"kv_blocks": 24},
    )
    try:
        asked, found = requests(prompts(LENGTHS), ASKED), 0
        for request in asked:
            assert tokens_of(node.ask(request)) == {request.handle: alone[request.handle]}
        for request in asked:
            events = node.ask(behind(request, alone[request.handle], 10 + request.handle))
            assert tokens_of(events) == {10 + request.handle: alone[request.handle][30:]}
            found += events[0].cached_tokens
        assert found >= 300 and node.tiers.stats().restores >= 3
    finally:
        node.close()
