"""Which node computes which tokens of a prompt that several compute: all of them once, and each after what it needs."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.forms import decode, decode_head, encode
from afserve.comm.kv.messages import Among, Prefill
from afserve.comm.kv.puller import Prompt
from afserve.comm.kv.sharing import (
    HERE_SECONDS,
    JOIN_SECONDS,
    MOST_AT_ONCE,
    MOST_HELPED,
    SILENT_SECONDS,
    TURN_SECONDS,
    Sharing,
)
from afserve.comm.kv.split import LEAD, Split, SplitMember, split_over
from afserve.comm.kv.split_messages import (
    Go,
    GroupJoined,
    Helped,
    Here,
    Leave,
    Propose,
    Slice,
    slice_checksum,
    unwrap,
    wrap,
)
from afserve.errors import ProtocolError
from tests.comm.kv_world import Store, chain, tokens_of

BLOCK = 8
splits = st.builds(
    split_over,
    st.integers(1, 2000),
    st.integers(0, 40).map(lambda blocks: blocks * BLOCK),
    st.integers(0, 17),
    st.integers(0, 300),
    st.just(BLOCK),
)


def of_part(split: Split, part: int) -> Split:
    return Split(split.tokens, split.start, split.chunk, split.parts, part)


def own(split: Split) -> list[range]:
    """What a node computes from `start` on, and how it goes on."""
    found, computed = [], split.start
    while computed < split.end:
        chunk = split.own(computed)
        found.append(chunk)
        computed = chunk.stop
    return found


@given(splits)
def test_every_token_is_computed_by_one_node_in_whole_blocks(split):
    if split is None:
        return
    parts = [own(of_part(split, part)) for part in range(split.parts)]
    assert all(parts), "every part has a chunk"
    chunks = sorted((chunk for part in parts for chunk in part), key=lambda chunk: chunk.start)
    assert [token for chunk in chunks for token in chunk] == list(range(split.start, split.tokens))
    assert all(chunk.start % BLOCK == 0 and len(chunk) <= split.chunk for chunk in chunks)
    assert parts[LEAD][-1].stop == split.tokens, "the lead has the last chunk"
    for part, chunks in enumerate(parts):
        assert of_part(split, part).end == chunks[-1].stop
        for chunk in chunks:
            behind = {p for p, c in enumerate(parts) if p != part and c[-1].start > chunk.start}
            assert of_part(split, part).takers(split.chunk_at(chunk.start)) == sorted(behind), (
                "who computes a later chunk needs it"
            )


@given(splits)
def test_neighbours_in_the_prompt_are_of_different_nodes(split):
    if split is not None:
        assert all(split.part_of(chunk) != split.part_of(chunk + 1) for chunk in range(split.chunks - 1))


@given(splits, st.integers(0, 15), st.data())
def test_what_is_before_the_start_is_computed_by_everybody(split, part, data):
    if split is None or not split.start:
        return
    computed = data.draw(st.integers(0, split.start - 1))
    chunk = of_part(split, part % split.parts).own(computed)
    assert chunk.start == computed and computed < chunk.stop <= split.start


MEMBERS = tuple(SplitMember(part, f"unix:{part}") for part in range(3))
SPLIT = split_over(100, 16, 3, 16, BLOCK)


def proposal(part: int = 1, group: int = 7, generation: int = 0) -> Propose:
    theirs = of_part(SPLIT, part)
    return Propose(
        group, theirs, MEMBERS, Prefill(3, 4, generation, tuple(range(theirs.end)), -2, "s", "t", 5)
    )


@pytest.mark.parametrize(
    "message",
    [
        Helped(5, MEMBERS),
        proposal(),
        GroupJoined(7, 2),
        Go(7),
        Slice(7, 1 << 20, 61, 4, 2, 1 << 63, b"x" * 64),
        Leave(7, "why not"),
        Here(7, 2),
    ],
)
def test_messages_are_what_they_were(message):
    head, body = encode(wrap(message))
    among = decode(decode_head(head, 64), bytes(body))
    assert isinstance(among, Among) and unwrap(among, 64) == message


@given(st.integers(0, 7), st.binary(max_size=200), st.integers(0, 9), st.integers(0, 9))
def test_no_bytes_are_taken_for_what_they_are_not(what, body, first, count):
    try:
        message = unwrap(Among(7, what, 0, first, count, 0, body), 64)
    except ProtocolError:
        return
    assert not isinstance(message, Propose)


@given(st.data())
def test_a_damaged_proposal_is_refused_or_fits_together(data):
    raw = bytearray(wrap(proposal()).body)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = unwrap(Among(7, 1, body=bytes(raw)), 64)
    except ProtocolError:
        return
    assert len(found.prefill.tokens) == found.split.end and len(found.members) == found.split.parts


# ---- who is in


class Wire:
    """Nodes whose messages arrive in any order, but of one to another in turn."""

    def __init__(self, count: int = 3, seed: int = 0) -> None:
        self.under_way = {(a, b): [] for a in range(count) for b in range(count)}
        self.dice = random.Random(seed)
        self.nodes = [
            Sharing(
                lambda peer, message, at=at: self.under_way[at, peer].append(message),
                lambda address: int(address.removeprefix("unix:")),
                at,
                64,
            )
            for at in range(count)
        ]

    def deliver(self, now: float = 0.0) -> None:
        while full := [pair for pair, queue in self.under_way.items() if queue]:
            sender, to = self.dice.choice(full)
            self.nodes[to].heard(sender, self.under_way[sender, to].pop(0), now)


def propose(wire: Wire):
    prefill = Prefill(3, 4, 0, tuple(range(SPLIT.tokens)))
    return wire.nodes[0].propose(SPLIT, MEMBERS, prefill, 0.0)


def slice_of(layer: int, first: int, payload: bytes, prompt) -> Slice:
    chunk = SPLIT.chunk_at(first * BLOCK)
    checksum = slice_checksum(prompt._name(chunk), layer, first, 1, payload)
    return Slice(prompt.group, chunk, layer, first, 1, checksum, payload)


@pytest.mark.parametrize("seed", range(5))
def test_all_begin_when_all_have_joined(seed):
    wire = Wire(seed=seed)
    shared = propose(wire)
    assert not wire.nodes[0].started
    wire.deliver()
    assert wire.nodes[0].started == [shared]
    others = [node.started[0] for node in wire.nodes[1:]]
    assert [one.split for one in others] == [of_part(SPLIT, 1), of_part(SPLIT, 2)]
    assert all(one.group == shared.group and len(one.prefill.tokens) == one.split.end for one in others)


def test_who_has_another_life_or_no_room_ends_it_for_all():
    wire = Wire()
    wire.nodes[2]._generation = 9
    shared = propose(wire)
    wire.deliver()
    for node in wire.nodes:
        node.tick(0.0)
        assert not (node.started or node.busy)
    assert "this is life 9" in shared.over and wire.nodes[0].ended == [shared]
    full = Wire()
    for _ in range(MOST_AT_ONCE + 1):
        propose(full)
    full.deliver()
    assert len(full.nodes[0].started) == MOST_AT_ONCE


def test_who_does_not_answer_is_waited_for_half_a_second():
    wire = Wire()
    shared = propose(wire)
    wire.under_way[0, 2].clear()
    wire.deliver()
    wire.nodes[0].tick(JOIN_SECONDS - 0.01)
    assert not shared.over
    wire.nodes[0].tick(JOIN_SECONDS)
    assert wire.nodes[0].ended == [shared]
    wire.deliver()
    wire.nodes[1].tick(0.0)
    assert not wire.nodes[1].busy and not wire.nodes[1].started, "it had joined, and is told"


def begun():
    wire = Wire()
    propose(wire)
    wire.deliver()
    return wire, [node.started[0] for node in wire.nodes]


def has(prompt, layer, first, last):
    arrived = prompt.arrived(layer, range(first * BLOCK, last * BLOCK), BLOCK)
    prompt.wait_for(arrived)
    return arrived.whole


def test_slices_are_there_once_and_only_where_they_belong():
    wire, (lead, *_) = begun()
    node = wire.nodes[0]
    assert not has(lead, 1, 2, 4)
    for first in (3, 2, 2):
        node.heard(1, wrap(slice_of(1, first, bytes([first]) * 4, lead)), 0.0)
    assert has(lead, 1, 2, 4) and not has(lead, 0, 2, 4)
    assert not has(lead, 1, 2, 5)
    assert lead.take(1, range(2, 4)) == [(range(2, 3), b"\2" * 4), (range(3, 4), b"\3" * 4)]
    node.heard(1, wrap(slice_of(1, 2, b"late", lead)), 0.0)
    assert not lead._come, "what was taken is not kept again"


@pytest.mark.parametrize("how", ["layer", "first", "payload", "chunk"])
def test_right_bytes_in_the_wrong_place_end_it(how):
    wire, prompts = begun()
    said = slice_of(1, 2, b"abcd", prompts[0])
    wrong = {"layer": 2, "first": 3, "payload": b"abce", "chunk": 1}[how]
    fields = {name: getattr(said, name) for name in Slice.__slots__}
    wire.nodes[0].heard(1, wrap(Slice(**fields | {how: wrong})), 0.0)
    wire.deliver()
    assert all("is not what was sent" in prompt.over for prompt in prompts)


def test_who_waits_for_a_silent_node_ends_it_and_who_does_not_wait_does_not():
    wire, (lead, other, _) = begun()
    wire.nodes[1].tick(100.0)
    assert not other.over, "it computes, or is done"
    has(lead, 0, 2, 4)
    assert lead.waits_for == lead.split.part_of(0)
    wire.nodes[0].tick(100.0)
    wire.nodes[0].tick(100.0 + SILENT_SECONDS - 0.01)
    assert not lead.over
    wire.nodes[0].heard(1, wrap(Here(lead.group, 3 - lead.waits_for)), 101.0)
    wire.nodes[0].tick(100.0 + SILENT_SECONDS)
    assert "nothing was heard" in lead.over, "another one is not waited for"
    wire.deliver()
    assert other.over == lead.over


def test_who_says_that_it_is_there_is_waited_for_longer():
    wire, (lead, *_) = begun()
    now = 0.0
    has(lead, 0, 2, 4)
    while not lead.over:
        for node in wire.nodes:
            node.tick(now)
        wire.deliver(now)
        now += HERE_SECONDS
    assert abs(now - TURN_SECONDS) <= 2 * HERE_SECONDS and "nothing came" in lead.over


def test_a_lost_connection_ends_it_for_those_who_need_it():
    wire, (lead, other, third) = begun()
    wire.nodes[1].lost(2, "killed")
    wire.deliver()
    assert "killed" in other.over and lead.over == other.over == third.over
    done, (lead, _, _) = begun()
    done.nodes[0].close(lead)
    done.nodes[0].lost(1, "ended")
    assert not lead.over, "it had all that it needed"


def test_a_slice_goes_to_those_who_compute_later_chunks_only():
    wire, prompts = begun()
    last, before = own(prompts[0].split)[-1], own(prompts[1].split)[-1]
    prompts[0].send(0, range(12, 13), last, b"last")
    assert not any(wire.under_way.values())
    prompts[1].send(0, range(10, 12), before, b"next")
    assert [pair for pair, queue in wire.under_way.items() if queue] == [(1, 0)]


@pytest.mark.parametrize("what", ["tokens", "split"])
def test_what_another_node_took_for_the_prompt_is_none_of_it(what):
    """A proposal may have been damaged on its way."""
    wire, (lead, other, _) = begun()
    if what == "tokens":
        other.prefill = replace(other.prefill, tokens=(9, *other.prefill.tokens[1:]))
    else:
        other.split = replace(other.split, start=other.split.start + BLOCK)
    wire.nodes[0].heard(1, wrap(slice_of(0, 3, b"abcd", other)), 0.0)
    assert "is not what was sent" in lead.over


def test_a_slice_that_reaches_over_its_chunk_ends_it():
    wire, (lead, *_) = begun()
    chunk = SPLIT.chunk_at(2 * BLOCK)
    end = SPLIT.tokens_of(chunk).stop // BLOCK
    checksum = slice_checksum(lead._name(chunk), 1, end - 1, 2, b"xx")
    wire.nodes[0].heard(1, wrap(Slice(lead.group, chunk, 1, end - 1, 2, checksum, b"xx")), 0.0)
    assert not has(lead, 1, end - 1, end)
    assert "reaches over block" in lead.over


def test_names_of_chunks_say_all_tokens_before():
    """In any order of asking, and another one once any token before the chunk's end is another."""
    prompts = []
    for changed in (None, 0, SPLIT.tokens_of(1).start):
        tokens = [changed == at or at for at in range(SPLIT.tokens)]
        if changed is not None:
            tokens[changed] = 99_999
        prompts.append(Wire().nodes[0].propose(SPLIT, MEMBERS, Prefill(3, 4, 0, tuple(tokens)), 0.0))
        object.__setattr__(prompts[-1], "group", 7)
    plain, first, second = prompts
    assert plain._name(2) != plain._name(1) != plain._name(0)
    assert first._name(0) != plain._name(0) and first._name(2) != plain._name(2)
    assert second._name(0) == plain._name(0) and second._name(1) != plain._name(1)


def test_a_slice_may_lie_far_behind_in_a_long_prompt():
    head, _ = encode(wrap(Slice(7, 600, 3, 1 << 17, 4, 5, b"x" * 64)))
    assert decode_head(head, 64).first == 1 << 17


class Said_:
    """Wires that keep what was said."""

    def __init__(self) -> None:
        self.sent, self.events = [], []

    def dial(self, address):
        return 1

    def send(self, peer, message):
        self.sent.append(message)

    def has_room(self, peer):
        return True

    def used(self, said):
        assert said.message

    kept = False

    def leave(self):
        pass

    give_way = leave

    def apart(self, peer):
        pass

    def receive(self, keep=False):
        found, self.events = self.events, []
        return found


def test_helpers_are_named_only_beside_a_prompt():
    """Where all blocks are here nothing is asked; what no prompt follows is forgotten for newer ones."""
    wires, store = Said_(), Store(64)
    exchange = Exchange(store, wires, FakeClock(), 1)
    names, prompt = chain(0, 4), Prompt(tokens_of(0, 4))
    store.compute(names)
    exchange.pull("x", names, 1.0, request=0, generation=1, prompt=prompt, members=MEMBERS)
    assert not wires.sent
    names, prompt = chain(1, 4), Prompt(tokens_of(1, 4))
    transfer = exchange.pull("x", names, 1.0, request=0, generation=1, prompt=prompt, members=MEMBERS)
    helped, prefill = (unwrap(wires.sent[0], 64), wires.sent[1])
    assert helped == Helped(transfer, MEMBERS) and isinstance(prefill, Prefill)
    wire = Wire()
    for number in range(MOST_HELPED + 5):
        wire.nodes[0].heard(1, wrap(Helped(number, MEMBERS)), 0.0)
    assert wire.nodes[0].helped((1, MOST_HELPED + 4)) == MEMBERS
    assert wire.nodes[0].helped((1, 0)) == () and len(wire.nodes[0]._helped) == MOST_HELPED - 1
