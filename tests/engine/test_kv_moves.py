"""When KV is moved and when it is computed again, and what is copied to whom: a scripted exchange, a fake clock."""

from dataclasses import asdict, replace

import pytest

from afserve.cli.status import kv_lines
from afserve.clock import FakeClock
from afserve.comm.kv.exchange import ExchangeStats
from afserve.comm.kv.puller import COMPLETE, Instead, Pulled
from afserve.comm.kv.source import KvSource
from afserve.config import EngineSettings
from afserve.control.copies import buddies, keepers_of
from afserve.control.wire.values import AttentionPeer
from afserve.control.wire.view_values import NodeView
from afserve.engine.kv.moving.copying import Copier
from afserve.engine.kv.moving.jobs import LEAST_SECONDS, UNKNOWN_SECONDS
from afserve.engine.kv.moving.moves import MOST_PULLS, KvMoves
from afserve.engine.scheduling.request import GenerationRequest
from afserve.engine.stats import AttentionStats, KvStats
from afserve.errors import ConfigError
from afserve.member import attention_life
from afserve.metrics import render
from afserve.server.metrics.nodes import counted
from tests.engine.scripted_kv import ScriptedEngine, ScriptedWire

BLOCK, BYTES = 16, 1000
SOURCE = KvSource(attention_life(1, 0), 77, "unix:there")


class Node(ScriptedEngine):
    most_room = 9

    def __init__(self):
        self.written = {}

    def usable_names(self, request):
        return [bytes([index]) * 16 for index in range((len(request.prompt_ids) - 1) // BLOCK)]

    def written_names(self):
        return self.written

    def written_names_of(self, handle):
        return self.written.get(handle, [])

    def has_room(self, names):
        return len(names) <= self.most_room


class Exchange(ScriptedWire):
    def __init__(self):
        super().__init__()
        self.pulls, self.cancelled, self.offers, self.parted = [], [], [], []
        self.instead: Instead | None = None

    def pull(self, address, names, limit, *, request, generation, prompt=None, members=(), instead=None):
        self.pulls.append((address, len(names), limit, request, generation))
        self.instead = instead
        return len(self.pulls)

    def cancel(self, transfer):
        self.cancelled.append(transfer)

    def part(self, request, names):
        self.parted.append((request, len(names)))

    def offer(self, address, names):
        self.offers.append((address, len(names)))
        return len(self.offers)

    def stats(self):
        return ExchangeStats()

    def ends(self, transfer, received, seconds, why=COMPLETE):
        self.ended.append(Pulled(transfer, 77, 10, received, 0, received * BYTES, seconds, why))


def request(handle, blocks=10):
    return GenerationRequest(handle, tuple(range(blocks * BLOCK + 1)))


@pytest.fixture
def scene():
    node, exchange, clock = Node(), Exchange(), FakeClock(9.0)
    return node, exchange, clock, KvMoves(node, exchange, clock, BLOCK, BYTES)


def test_the_first_is_pulled_and_later_ones_by_what_was_measured(scene):
    node, exchange, _, moves = scene
    assert moves.pull(request(1), SOURCE) and moves.busy
    assert moves.turn() == []
    assert exchange.pulls == [("unix:there", 10, UNKNOWN_SECONDS, 77, 0)] and exchange.instead is None
    exchange.ends(1, 10, 0.1)  # 100 kB/s, so 10 blocks take 0.1 s
    assert moves.turn() == [replace(request(1), from_peer=10 * BLOCK)] and not moves.busy
    node.prefill_rate = 10 * BLOCK / 0.05  # and 0.05 s to compute
    assert not moves.pull(request(2), SOURCE)
    node.prefill_rate = 10 * BLOCK / 5.0
    assert moves.pull(request(3), SOURCE)
    moves.turn()
    assert exchange.pulls[-1][2] == pytest.approx(5.0)
    assert exchange.instead == Instead(5.0, 0.5), "a tenth"
    node.prefill_rate = 10 * BLOCK / 0.15
    assert moves.pull(request(4), SOURCE)
    moves.turn()
    assert exchange.pulls[-1][2] == LEAST_SECONDS
    assert exchange.instead is not None and exchange.instead.seconds == pytest.approx(0.15)
    assert exchange.instead.patience == pytest.approx(3 * (0.1 / 1.5 + 0.002)), "refused once"


def test_a_link_over_which_nothing_comes_is_left_alone_and_tried_again_and_others_are_not_blamed(scene):
    node, exchange, _, moves = scene
    node.prefill_rate = 10 * BLOCK / 0.2
    assert moves.pull(request(1), SOURCE)
    moves.turn()
    exchange.ends(1, 0, LEAST_SECONDS, "nothing came for 1 s")
    moves.turn()
    other = KvSource(attention_life(2, 0), 77, "unix:other")
    assert moves.pull(request(2), other), "nobody has asked that one yet"
    refused = 0
    while not moves.pull(request(3 + refused), SOURCE):
        refused += 1
    assert 6 < refused < 13, "1.5 to the tenth is 57"


def test_nothing_is_pulled_of_a_short_prompt_or_from_nowhere(scene):
    *_, moves = scene
    assert not moves.pull(request(1, blocks=0), SOURCE)
    assert not moves.pull(request(1), KvSource(attention_life(1, 0), 77, ""))


def test_what_does_not_come_is_counted_and_the_request_goes_on(scene):
    _, exchange, _, moves = scene
    moves.pull(request(1), SOURCE)
    moves.turn()
    exchange.ends(1, 4, 0.5, "nothing came for 1 s")
    assert moves.turn() == [replace(request(1), from_peer=4 * BLOCK)]
    found = moves.stats()
    assert (found.pulls, found.pulls_failed, found.recomputed_tokens) == (1, 1, 6 * BLOCK)
    assert found.pull_seconds == 0.5


def test_few_are_pulled_at_once_and_nobody_waits_longer_than_its_limit(scene):
    _, exchange, clock, moves = scene
    for handle in range(MOST_PULLS + 2):
        assert moves.pull(request(handle), SOURCE)
    moves.turn()
    assert len(exchange.pulls) == MOST_PULLS
    moves.cancel(MOST_PULLS)
    moves.cancel(0)
    assert exchange.cancelled == [1]
    clock.advance(UNKNOWN_SECONDS)
    assert moves.turn() == [request(MOST_PULLS + 1)] and len(exchange.pulls) == MOST_PULLS
    exchange.ends(1, 10, 0.1)
    assert moves.turn() == [], "it was cancelled"


def test_what_leaves_is_named(scene):
    node, exchange, _, moves = scene
    node.written = {5: [b"a", b"b"]}
    moves.part(5)
    assert exchange.parted == [(5, 2)]


def peers(*indices, refusing=()):
    return [AttentionPeer(attention_life(i, 0), i not in refusing, f"unix:{i}") for i in indices]


def test_buddies_are_the_next_that_take_requests():
    assert [p.life.index for p in buddies(peers(0, 1, 3, 5, refusing=(3,)), 1, 2)] == [5, 0]
    assert [p.life.index for p in buddies(peers(0, 5), 1, 2)] == [5, 0], "the same when it is gone"
    assert buddies(peers(1), 1, 2) == []


def test_copies_are_offered_in_order_one_offer_at_a_time():
    node, exchange, clock = Node(), Exchange(), FakeClock(9.0)
    copier = Copier(node, exchange, 1 << 20, clock)  # an offer holds 4 blocks
    copier.turn()
    copier.copy_to(keepers_of(peers(0, 1, 2), 0, 1))
    node.written = {5: [b"n"] * 6, 6: [b"m"] * 2}

    def turn():
        clock.advance(0.25)
        copier.turn()
        return exchange.offers[-1]

    assert turn() == ("unix:1", 4) and turn() and len(exchange.offers) == 1, "the one before is not settled"
    copier.settled(1, 4)
    assert turn() == ("unix:1", 2)
    copier.settled(2, 1)
    assert turn() and len(exchange.offers) == 2, (
        "it kept less than it was offered: it is left alone for a while"
    )
    clock.advance(1.0)
    assert turn() == ("unix:1", 2)
    copier.settled(3, 2)
    assert turn() == ("unix:1", 1)
    copier.settled(4, 1)
    assert turn() and len(exchange.offers) == 4 and copier.blocks == 8, "everything is there"
    copier.copy_to(keepers_of(peers(0, 2), 0, 1))
    assert turn() == ("unix:2", 4), "another one knows nothing yet"
    copier.settled(4, 1)
    assert copier.blocks == 8, "nobody's offer"


def test_a_node_without_a_copier_offers_nobody_anything(scene):
    node, exchange, _, moves = scene
    node.written = {1: [bytes([block]) * 16 for block in range(4)]}
    moves.copy_to(keepers_of(peers(0, 1), 0, 1))
    assert moves.turn() == [] and not exchange.offers


def test_status_says_what_moved_once_something_has():
    def answer(**fields):
        stats = {"kv": asdict(KvStats(**fields))}
        return {"nodes": [{"role": "attention", "stats": stats}, {"role": "gateway", "stats": None}]}

    assert kv_lines(answer()) == []
    (line,) = kv_lines(answer(bytes_received=2_500_000, pulls=3, pulls_failed=1, copies=7))
    assert line.startswith(
        "KV: 2.5 MB moved between attention nodes, 3 requests brought theirs along (1 in part)"
    )
    assert "7 copies held" in line


def test_copies_need_the_prefix_cache():
    with pytest.raises(ConfigError, match="--kv-copies: blocks are found as prefixes are"):
        EngineSettings(kv_copies=1, prefix_caching=False)


def test_status_and_metrics_say_what_prefill_nodes_did():
    stats = AttentionStats(
        running=2, queued_tokens=40, kv=KvStats(1, 1, handed=4, hand_seconds=2.0, straight=3)
    )
    nodes = [{"role": "attention", "stats": asdict(stats)}]
    line, _ = kv_lines({"nodes": nodes})
    assert line.startswith("prompts: 4 handed over by prefill nodes (0 in part), 500.0 ms each")
    assert "; 3 computed by a decode node" in line
    said = [("decode", stats), ("decode", stats), ("prefill", AttentionStats(queued_tokens=5))]
    views = [NodeView("attention-0", "attention", "ready", 1, 0.0, 0, of, phase) for phase, of in said]
    drawn = render(counted(views), ())
    assert 'afserve_phase_queued_tokens{phase="decode"} 80' in drawn
    assert 'afserve_phase_queued_tokens{phase="prefill"} 5' in drawn
    assert 'afserve_prompts_handed_over_total{node="attention-0"} 4' in drawn
