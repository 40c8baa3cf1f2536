"""Where requests are computed, case by case: moves, waits, refusals and deadlines, with a fake clock."""

import asyncio

import pytest

from afserve.clock import FakeClock
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.control.homes import AGAIN_SECONDS, HomeRules, Homes
from afserve.control.requests import Requests
from afserve.control.wire.request_values import (
    Cancel,
    Held,
    Refused,
    Resume,
    Submit,
    Tokens,
)
from afserve.control.wire.values import (
    AttentionNodes,
    AttentionPeer,
)
from afserve.engine.scheduling.request import (
    AHEAD_PRIORITY,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from afserve.errors import OverloadedError, PeerError, PeerLost, RendezvousError, UnavailableError
from afserve.member import AttentionPhase, attention_life

RULES = HomeRules(grace=1.0, deadline=30.0)
ASKED = GenerationRequest(0, (1, 2, 3))


class Stream:
    def __init__(self, index, generation=0, number=1):
        self.life, self.number, self.sent = attention_life(index, generation), number, []

    def send(self, value):
        self.sent.append(value)

    def submitted(self):
        return [value.request for value in self.sent if isinstance(value, Submit)]


class Scene:
    """Nodes 0 and 1 attend."""

    def __init__(self, *nodes):
        self.clock = FakeClock(50.0)
        self.homes = Homes(Requests(), RULES, self.clock)
        self.streams = [Stream(index) for index in nodes]
        self.tell(*nodes)
        for stream in self.streams:
            self.homes.entered(stream, ())

    def tell(self, *nodes, draining=()):
        self.homes.update_nodes(
            AttentionNodes(tuple(AttentionPeer(attention_life(n, 0), n not in draining) for n in nodes))
        )

    def after(self, seconds):
        self.clock.advance(seconds)
        self.homes.check_time()

    def submits(self):
        return [len(stream.submitted()) for stream in self.streams]


def outcome(request):
    return asyncio.run(request.get())


def with_room(tokens):
    """Nodes 0 and 1, each with a cache of so many tokens."""
    scene = Scene(0, 1)
    scene.homes = Homes(Requests(), HomeRules(grace=1.0, deadline=30.0, cache_tokens=tokens), scene.clock)
    scene.tell(0, 1)
    for stream in scene.streams:
        scene.homes.entered(stream, ())
    return scene


def test_a_lost_node_is_left_at_once_and_its_late_words_are_nobodys():
    scene = Scene(0, 1)
    first, second = scene.streams
    request = scene.homes.open(ASKED)
    number = first.submitted()[0].handle
    scene.homes.heard(first, Tokens((TokenEvent(number, (5, 6)),)))
    scene.tell(1)
    (again,) = second.submitted()
    assert (again.prompt_ids, again.generated) == (ASKED.prompt_ids, (5, 6)) and again.handle != number
    assert Cancel(number, parts=True) in first.sent, "where it can be told"
    scene.homes.heard(first, Tokens((TokenEvent(number, (7,)),)))
    scene.homes.heard(second, Tokens((TokenEvent(again.handle, (7,), "length"),)))
    assert request.generated == [5, 6, 7] and request.finished
    assert scene.homes.moves.counts == {"lost": 1}


def begin(scene, prompt, **asked):
    """Where it is once its first token has come."""
    request = scene.homes.open(GenerationRequest(0, tuple(prompt), **asked))
    stream = scene.streams[request.home.index]
    scene.homes.heard(stream, Tokens((TokenEvent(request.number, (5,)),)))
    return request


def test_a_node_whose_cache_is_full_of_prompts_is_left_to_those_that_are_there():
    scene, early, late = with_room(1000), range(900), range(5000, 5900)
    first = begin(scene, early)
    home = first.home
    scene.homes.close(first)
    second = begin(scene, late)
    assert second.home == home, "nothing tells the nodes apart, so it is the same one"
    assert begin(scene, (*early, 5, 6)).home != home, "it has most of it, and room for none"
    scene.homes.close(second)
    assert scene.homes.open(GenerationRequest(0, (*late, 5, 7))).home == home, "its room is free again"


def test_what_is_computed_ahead_takes_no_room():
    """Conversations of 2,000 tokens that one node knows, and the next turn of each: a node has room for three."""
    scene = with_room(7000)
    talks = [range(first, first + 2000) for first in range(0, 80_000, 10_000)]
    first = begin(scene, talks[0])
    home = first.home
    scene.homes.close(first)
    ahead = [begin(scene, (*talks[0], 9, each), priority=AHEAD_PRIORITY) for each in range(8)]
    assert {each.home for each in ahead} == {home} and scene.homes.requests.prompt_tokens(home) == 0
    for each, talk in enumerate(talks[1:]):
        scene.homes.requests.place(
            scene.homes.requests.open(GenerationRequest(each, tuple(talk), priority=AHEAD_PRIORITY), 50.0),
            home,
            50.0,
        )
    assert scene.homes.open(GenerationRequest(0, (*talks[0], 7))).home == home
    for each in ahead:
        scene.homes.close(each)
    assert scene.homes.requests.prompt_tokens(home) == 2001, "what ends gives back what it took"


def test_a_beginning_that_many_requests_share_takes_room_once():
    """Five requests share 20,000 tokens: 21,000 of 100,000 are taken, so a sixth finds room beside them."""
    scene, system = with_room(100_000), range(20_000)
    first = begin(scene, system)
    opened = [begin(scene, (*system, *range(30_000 + each, 30_200 + each))) for each in range(0, 1200, 200)]
    home = first.home
    assert {each.home for each in opened} == {home}
    taken = scene.homes.requests.prompt_tokens(home)
    assert 21_200 <= taken <= 21_200 + 6 * 256, "their last tokens have no keys"
    scene.homes.close(first)
    for each in opened[1:]:
        scene.homes.close(each)
    assert scene.homes.requests.prompt_tokens(home) == 20_200
    scene.homes.close(opened[0])
    assert scene.homes.requests.prompt_tokens(home) == 0


def test_a_stream_that_comes_back_in_time_goes_on_where_it_was():
    scene = Scene(0, 1)
    first, second = scene.streams
    request = scene.homes.open(ASKED)
    number = first.submitted()[0].handle
    scene.homes.heard(first, Tokens((TokenEvent(number, (5, 6)),)))
    scene.homes.left(first)
    scene.after(0.9)
    again = Stream(0, number=2)
    scene.homes.entered(again, (Held(number, 4), Held(77, 1)))
    assert again.sent == [Resume(number, 2), Cancel(77)]
    scene.after(5.0)
    assert request.home == attention_life(0, 0) and second.sent == [] and not scene.homes.restless


def test_a_stream_that_stays_away_is_not_waited_for():
    scene = Scene(0, 1)
    first, second = scene.streams
    scene.homes.open(ASKED)
    scene.homes.left(first)
    scene.after(0.9)
    assert second.sent == []
    scene.after(0.2)
    assert len(second.submitted()) == 1
    late = Stream(0, number=2)
    scene.homes.entered(late, (Held(first.submitted()[0].handle, 9),))
    assert late.sent == [Cancel(first.submitted()[0].handle)]


def test_who_drains_keeps_its_requests_until_another_takes_them():
    scene = Scene(0)
    scene.homes.open(ASKED)
    scene.tell(0, draining=(0,))
    scene.homes.open(ASKED)
    assert scene.submits() == [1] and len(scene.homes.requests.waiting) == 1
    other = Stream(1)
    scene.homes.entered(other, ())
    scene.tell(0, 1, draining=(0,))
    assert len(other.submitted()) == 2 and scene.homes.moves.counts == {"drained": 1}


def test_who_waits_too_long_is_told_why():
    scene = Scene(0)
    moved = scene.homes.open(ASKED)
    scene.tell()
    fresh = scene.homes.open(ASKED)
    scene.after(RULES.deadline - 0.1)
    assert len(scene.homes.requests.waiting) == 2 and scene.homes.restless
    scene.after(0.2)
    with pytest.raises(PeerLost, match=r"attention-0: .* within 30 s"):
        outcome(moved)
    with pytest.raises(UnavailableError, match=r"no attention node took .* within 30 s"):
        outcome(fresh)
    for request in (moved, fresh):
        scene.homes.close(request)
    assert not scene.homes.restless and len(scene.homes.requests) == 0


def test_a_client_that_leaves_while_its_request_waits_leaves_nothing():
    scene = Scene(0)
    request = scene.homes.open(ASKED)
    scene.tell()
    scene.homes.close(request)
    scene.tell(0)
    scene.homes.entered(Stream(0, number=2), ())
    assert len(scene.homes.requests) == 0 and scene.submits() == [1]


def test_a_full_node_refuses_what_is_new_and_is_asked_again_for_what_moved():
    scene = Scene(0, 1)
    first, second = scene.streams
    fresh = scene.homes.open(ASKED)
    scene.homes.heard(first, Refused(first.submitted()[0].handle, OverloadedError("full")))
    with pytest.raises(OverloadedError, match="full"):
        outcome(fresh)
    scene.homes.close(fresh)
    moved = scene.homes.open(ASKED)
    scene.tell(1)
    scene.homes.heard(second, Refused(second.submitted()[-1].handle, OverloadedError("full")))
    assert scene.homes.requests.waiting == [moved] and moved.since == 50.0
    scene.after(AGAIN_SECONDS / 2)
    assert len(second.submitted()) == 1
    scene.after(AGAIN_SECONDS)
    assert len(second.submitted()) == 2 and not moved.finished


def test_a_request_that_its_node_keeps_no_more_is_given_out_again():
    scene = Scene(0)
    scene.homes.open(ASKED)
    scene.homes.heard(
        scene.streams[0], Refused(scene.streams[0].submitted()[0].handle, PeerError("not kept"))
    )
    assert scene.submits() == [2] and scene.homes.moves.counts == {"stream": 1}


@pytest.mark.parametrize("late", [Stream(0, 0, 1), Stream(0, 0, 2), Stream(0, 1, 1)])
def test_neither_an_earlier_life_nor_an_earlier_stream_takes_a_later_ones_place(late):
    scene = Scene()
    scene.homes.entered(Stream(0, 1, 2), ())
    with pytest.raises(RendezvousError, match="newer"):
        scene.homes.entered(late, ())


def test_a_later_life_says_that_the_earlier_one_is_lost():
    scene = Scene(0, 1)
    scene.homes.open(ASKED)
    scene.homes.entered(Stream(0, 1), ())
    assert scene.submits() == [1, 1]


def kv_scene(copies=0):
    """Nodes 0 to 2, with addresses; a request at node 0 that has said two tokens: (scene, its number there)."""
    scene = Scene(0, 1, 2)
    scene.homes = Homes(Requests(), HomeRules(grace=1.0, deadline=30.0, copies=copies), scene.clock)
    tell_with_addresses(scene, 0, 1, 2)
    for stream in scene.streams:
        scene.homes.entered(stream, ())
    scene.homes.open(ASKED)
    number = scene.streams[0].submitted()[0].handle
    scene.homes.heard(scene.streams[0], Tokens((TokenEvent(number, (5, 6)),)))
    return scene, number


def tell_with_addresses(scene, *nodes, draining=()):
    peers = (AttentionPeer(attention_life(n, 0), n not in draining, f"unix:{n}") for n in nodes)
    scene.homes.update_nodes(AttentionNodes(tuple(peers)))


def last_submit(stream):
    return next((value for value in reversed(stream.sent) if isinstance(value, Submit)), None)


def test_a_node_that_drains_is_where_the_kv_of_its_requests_is():
    scene, number = kv_scene()
    tell_with_addresses(scene, 0, 1, 2, draining=(0,))
    assert scene.streams[0].sent[-1] == Cancel(number, parts=True)
    moved = last_submit(scene.streams[1])
    assert moved.kv_from == KvSource(attention_life(0, 0), number, "unix:0") and moved.request.generated == (
        5,
        6,
    )


def test_a_lost_nodes_requests_go_where_copies_are():
    scene, _ = kv_scene(copies=1)
    scene.homes.open(GenerationRequest(1, (7, 8, 9)))
    assert len(scene.streams[1].submitted()) == 1
    tell_with_addresses(scene, 1, 2)
    moved = last_submit(scene.streams[1])
    assert moved.request.generated == (5, 6) and moved.kv_from is None, "the least busy one is not the buddy"


def test_a_buddy_that_is_too_busy_is_asked_for_the_copies():
    scene, _ = kv_scene(copies=1)
    scene.homes.attendance.update_peers(
        AttentionNodes((AttentionPeer(attention_life(1, 0), True, "unix:1"),))
    )
    for handle in range(20):
        scene.homes.open(GenerationRequest(handle, (7, 8, handle)))
    tell_with_addresses(scene, 1, 2)
    moved = last_submit(scene.streams[2])
    assert moved.kv_from == KvSource(attention_life(1, 0), 0, "unix:1") and moved.request.generated == (5, 6)


def test_without_copies_a_lost_nodes_kv_is_nowhere():
    scene, _ = kv_scene()
    tell_with_addresses(scene, 1, 2)
    assert last_submit(scene.streams[1]).kv_from is None


def only_unheard(scene):
    (unheard,) = scene.homes.unheard()
    return unheard.life, unheard.seconds


def test_a_node_that_has_requests_and_says_nothing_is_reported_while_that_lasts():
    scene = Scene(0, 1)
    scene.after(5.0)
    assert scene.homes.unheard() == [], "it has nothing to say anything of"
    request = scene.homes.open(ASKED)
    number = scene.streams[0].submitted()[0].handle
    scene.after(0.9)
    assert scene.homes.unheard() == []
    scene.after(0.2)
    assert only_unheard(scene) == (attention_life(0, 0), pytest.approx(1.1))
    scene.homes.heard(scene.streams[0], Tokens((TokenEvent(number, (5,)),)))
    scene.after(0.5)
    assert scene.homes.unheard() == []
    scene.after(0.5)
    assert only_unheard(scene) == (attention_life(0, 0), pytest.approx(1.0))
    scene.homes.close(request)
    assert scene.homes.unheard() == []


# ---- phases

LONG = GenerationRequest(0, tuple(range(100)))


def phased_scene(*phases):
    """Nodes 0, 1, ... attend in these phases."""
    scene = Scene(*range(len(phases)))
    tell_phases(scene, dict(enumerate(phases)))
    return scene


def tell_phases(scene, phases):
    peers = (
        AttentionPeer(attention_life(n, 0), True, f"unix:{n}", AttentionPhase(phase))
        for n, phase in phases.items()
    )
    scene.homes.update_nodes(AttentionNodes(tuple(peers)))


def prefills(stream):
    source = last_submit(stream).kv_from
    return None if source is None else (source.life.index, source.prefills)


def test_a_prompt_goes_to_a_decode_node_which_has_it_computed_elsewhere():
    scene = phased_scene("prefill", "decode", "decode")
    scene.homes.open(LONG)
    assert scene.submits() == [0, 1, 0] and prefills(scene.streams[1]) == (0, True)
    scene.homes.open(ASKED)
    assert scene.submits() == [0, 1, 1] and prefills(scene.streams[2]) is None, "it fills no block"
    for told in (SamplingParams(prompt_logprobs=1), SamplingParams(return_routed_experts=True)):
        scene = phased_scene("prefill", "decode")
        scene.homes.open(GenerationRequest(0, tuple(range(200, 300)), told))
        assert scene.submits() == [0, 1]
        assert prefills(scene.streams[1]) is None, "its prompt has to be computed where it is told about"


def test_nodes_that_do_both_need_no_prefill_node():
    scene = phased_scene("prefill", "both")
    scene.homes.open(LONG)
    assert scene.submits() == [0, 1] and prefills(scene.streams[1]) is None


def test_prompts_go_to_the_prefill_node_with_the_fewest_tokens_before_them():
    scene = phased_scene("decode", "prefill", "prefill")
    decode = scene.streams[0]

    def opened(first, tokens):
        scene.homes.open(GenerationRequest(0, tuple(range(first, first + tokens))))
        return prefills(decode)[0]

    assert opened(0, 5000) == 1 and opened(10_000, 900) == 2 and opened(20_000, 900) == 2
    number = decode.submitted()[0].handle
    scene.homes.heard(decode, Tokens((TokenEvent(number, (5,)),)))
    assert opened(30_000, 900) == 1, "the long one is done"
    assert opened(30_000, 900) == 1, "it has seen its beginning"


def test_the_other_prefill_nodes_may_help_with_a_prompt_that_has_a_time_limit():
    scene = phased_scene("decode", "prefill", "prefill", "prefill")

    def opened(first, **limits):
        scene.homes.open(GenerationRequest(0, tuple(range(first, first + 900)), **limits))
        return last_submit(scene.streams[0]).kv_from

    assert not opened(0).helpers and opened(1000).within is None, "nobody waits for these"
    asked = opened(2000, ttft=1.5)
    assert (asked.life.index, asked.within) == (3, 1.5)
    assert asked.helpers == (SplitMember(0, "unix:1"), SplitMember(0, "unix:2"))
    again = opened(3000, ttft=1.5)
    assert (again.life.index, again.helpers[0]) == (1, SplitMember(0, "unix:2")), (
        "the one with the least to do first"
    )


def test_without_one_side_the_other_does_it_all():
    scene = phased_scene("prefill", "decode")
    scene.homes.open(LONG)
    tell_phases(scene, {1: "decode"})
    scene.homes.open(LONG)
    assert prefills(scene.streams[1]) is None
    tell_phases(scene, {0: "prefill"})
    assert len(scene.streams[0].submitted()) == 2 and prefills(scene.streams[0]) is None


def test_a_node_that_changes_its_phase_keeps_what_it_has():
    scene = phased_scene("prefill", "decode", "decode")
    scene.homes.open(LONG)
    tell_phases(scene, {0: "prefill", 1: "prefill", 2: "decode"})
    scene.homes.open(LONG)
    assert scene.submits() == [0, 1, 1]


def test_a_lost_decode_nodes_requests_have_their_prompts_computed_again():
    scene = phased_scene("prefill", "decode", "decode")
    scene.homes.open(LONG)
    number = scene.streams[1].submitted()[0].handle
    scene.homes.heard(scene.streams[1], Tokens((TokenEvent(number, (5, 6)),)))
    tell_phases(scene, {0: "prefill", 2: "decode"})
    moved = last_submit(scene.streams[2])
    assert moved.request.generated == (5, 6) and prefills(scene.streams[2]) == (0, True)
