"""Between hosts: the same mailboxes in private memory at both ends, and gloo to carry a message from one to the other.

A pump thread per box waits for messages, puts them into the incoming mailbox and sets its flag; from there on all
is as in shared memory. Address: `dist:HOST:PORT` of the expert node's store. It knows nothing of what travels.
"""

import json
import threading
import time
from collections.abc import Sequence

import torch

from afserve.comm.flags import Board, open_board
from afserve.comm.groups import ATTENTION_RANK, EXPERT_RANK, Meeting, Pair, join_store, open_store
from afserve.comm.lanes import Lanes
from afserve.comm.lost import Lost
from afserve.comm.rendezvous import compare, terms
from afserve.comm.segment import Segment, SegmentMap
from afserve.comm.transport import Box, Header, Layout, Parcel
from afserve.comm.wire import FIRST_BYTE, check_layout, sequence_of
from afserve.errors import RendezvousError

_LOOK_SECONDS = 0.1  # how often a waiting end asks whether its peers are there
_MEET_SECONDS = 5.0  # how long an expert node waits for a node that has announced itself
_CLOSE_SECONDS = 2.0
_ACCEPT_SECONDS = 0.05  # how often an expert node looks for newcomers


class DistTransport:
    """One end. `attention` is None on the expert node."""

    def __init__(self, segments: Sequence[Segment], attention: int | None) -> None:
        self._layout = segments[0].map.layout
        self._attention = attention
        self._lanes = Lanes(segments, attention, spins=False)
        self._lost = Lost(attention_side=attention is not None)
        self._pairs: dict[int, Pair] = {}
        self._taken_from: dict[Box, Pair | None] = {}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._segments = {segment.map.expert: segment for segment in segments}
        self._doorbells: dict[Box, Board] = {}
        self._rebuild()

    @property
    def layout(self) -> Layout:
        return self._layout

    def boxes(self) -> list[Box]:
        return self._lanes.boxes()

    def next_sequence(self, box: Box) -> int:
        return self._lanes.next_sequence(box)

    def stage(self, box: Box, header: Header) -> Parcel:
        return self._lanes.stage(box, header)

    def post(self, box: Box) -> None:
        if self._lost:
            self._lost.raise_for([box])
        if self._lanes.post(box):
            self._send(box)

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        return self._lanes.ready(boxes)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            found = self._lanes.wait(boxes, max(0.0, min(left, _LOOK_SECONDS)))
            if found:
                return found
            if self._lost:
                found = self._lanes.ready(boxes)  # what came before the loss counts
                if found:
                    return found
                self._lost.raise_for(boxes)
            if left <= _LOOK_SECONDS:
                return []

    def take(self, box: Box) -> Parcel:
        self._taken_from[box] = self._pairs.get(self._peer(box))
        return self._lanes.take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._lanes.refuse(box, reason)
        self._send(box)

    def close(self) -> None:
        """Say goodbye on every box, so that no thread of either end is left waiting."""
        self._closing.set()
        for peer, pair in list(self._pairs.items()):
            for box in self._boxes_of(peer):
                self._bye(pair, box)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._pairs.clear()
        self._taken_from.clear()

    def attach(self, expert: int, address: str, timeout: float) -> None:
        assert self._attention is not None, "an expert node attaches nobody"
        segment, pair = _join(address, expert, self._attention, self._layout, timeout)
        self.detach(expert)
        self._segments[expert] = segment
        self._rebuild()
        self.admit(expert, pair)

    def detach(self, expert: int) -> None:
        pair = self._pairs.pop(expert, None)
        if pair is not None:
            for box in self._boxes_of(expert):
                self._bye(pair, box)
        self._segments.pop(expert, None)
        self._rebuild()
        self._lost.clear(expert)

    def _rebuild(self) -> None:
        """Every box has a doorbell of its own, which its pump keeps for as long as it runs."""
        self._segments = dict(sorted(self._segments.items()))
        self._lanes.rebuild(list(self._segments.values()))
        for segment in self._segments.values():
            for box in segment.map.boxes(self._attention):
                words = segment.lane_words(box, attention_side=self._attention is None)
                self._doorbells.setdefault(box, open_board([words], []))
        self._doorbells = {box: self._doorbells[box] for box in self._lanes.boxes()}

    def start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def admit(self, peer: int, pair: Pair) -> None:
        """`pair` is the way to `peer` from now on, until it is gone."""
        self._pairs[peer] = pair
        self._lost.clear(peer)
        self.start(
            threading.Thread(target=self._serve, args=(peer, pair), name=f"afserve-{peer}", daemon=True)
        )

    def connected(self, peer: int) -> bool:
        return peer in self._pairs

    def _serve(self, peer: int, pair: Pair) -> None:
        """Pump every box of one peer; this thread takes one of them."""
        first, *others = self._boxes_of(peer)
        pumps = [threading.Thread(target=self._pump, args=(peer, pair, box), daemon=True) for box in others]
        for thread in pumps:
            thread.start()
        self._pump(peer, pair, first)
        for thread in pumps:
            thread.join()
        if self._pairs.get(peer) is pair:
            del self._pairs[peer]

    def pause(self, seconds: float) -> bool:
        """Wait; True at once when this end closes."""
        return self._closing.wait(seconds)

    def _peer(self, box: Box) -> int:
        return box.attention if self._attention is None else box.expert

    def _boxes_of(self, peer: int) -> list[Box]:
        return [box for box in self._doorbells if self._peer(box) == peer]

    def _send(self, box: Box) -> None:
        """An answer to somebody whose place another one has taken since is not sent."""
        pair = self._pairs.get(self._peer(box))
        if pair is None or (self._attention is None and self._taken_from.get(box) is not pair):
            return
        try:
            pair.send(self._lanes.outgoing(box).message(), box.micro_batch)
        except RuntimeError:
            self._lost.mark(self._peer(box), "its connection has ended")

    def _pump(self, peer: int, pair: Pair, box: Box) -> None:
        inbox_B, doorbell = self._lanes.incoming(box).memory_B, self._doorbells[box]
        head = inbox_B.numpy().data
        while True:
            before = sequence_of(head)
            try:
                pair.receive(inbox_B, box.micro_batch)
            except RuntimeError:
                self._end(peer, pair, "its connection has ended")
                return
            if sequence_of(head) == before:
                self._end(peer, pair, "it has left")
                if not self._closing.is_set():
                    self._bye(pair, box)
                return
            doorbell.post(0, sequence_of(head))

    def _end(self, peer: int, pair: Pair, why: str) -> None:
        """A pair that was detached is nobody's loss."""
        if self._pairs.get(peer) is pair:
            self._lost.mark(peer, why)

    def _bye(self, pair: Pair, box: Box) -> None:
        """Goodbye is the first byte of a message and no more: it changes nothing in the inbox, not even the number."""
        try:
            pair.send(torch.tensor([FIRST_BYTE], dtype=torch.uint8), box.micro_batch)
        except RuntimeError:
            self._lost.mark(self._peer(box), "its connection has ended")


def listen(expert: int, attention_nodes: int, layout: Layout, host: str) -> tuple[DistTransport, str]:
    """An expert node's end and its address. Nothing listens but on `host`."""
    check_layout(layout)
    meeting = open_store(host)
    agreed = terms(layout, expert=expert, attention_nodes=attention_nodes)
    meeting.store.set("terms", json.dumps(agreed))
    end = DistTransport([Segment.private(SegmentMap(layout, expert, attention_nodes))], None)
    acceptor = threading.Thread(
        target=_accept, args=(end, meeting), name=f"afserve-expert-{expert}", daemon=True
    )
    end.start(acceptor)
    return end, f"dist:{meeting.host}:{meeting.port}"


def _accept(end: DistTransport, meeting: Meeting) -> None:
    """Let attention nodes in, one after the other in the same place."""
    turns = dict.fromkeys((box.attention for box in end.boxes()), 0)
    while not end.pause(_ACCEPT_SECONDS):
        for attention, turn in turns.items():
            if end.connected(attention) or meeting.store.add(f"turn/{attention}", 0) <= turn:
                continue
            turns[attention] += 1
            try:
                pair = Pair(meeting, f"pair/{attention}/{turn + 1}", EXPERT_RANK, _MEET_SECONDS)
            except RuntimeError:
                continue  # it gave up, or died, between announcing itself and meeting
            end.admit(attention, pair)


def connect(addresses: Sequence[str], attention: int, layout: Layout, timeout: float) -> DistTransport:
    """An attention node's end, with one group per expert node."""
    check_layout(layout)
    segments, pairs = [], []
    for expert, address in enumerate(addresses):
        segment, pair = _join(address, expert, attention, layout, timeout)
        segments.append(segment)
        pairs.append(pair)
    end = DistTransport(segments, attention)
    for expert, pair in enumerate(pairs):
        end.admit(expert, pair)
    return end


def _join(address: str, expert: int, attention: int, layout: Layout, timeout: float) -> tuple[Segment, Pair]:
    peer = f"expert-{expert}"
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind != "dist" or not host or not port.isdecimal():
        raise RendezvousError(f"{peer}: {address!r} is not an address of the form dist:HOST:PORT")
    meeting = join_store(host, int(port), peer, timeout)
    theirs = {name: int(value) for name, value in json.loads(meeting.store.get("terms")).items()}
    mine = terms(layout, expert=expert, attention_nodes=max(theirs.get("attention_nodes", 0), attention + 1))
    compare(mine, theirs, me=f"attention-{attention}", peer=peer)
    turn = meeting.store.add(f"turn/{attention}", 1)
    try:
        pair = Pair(meeting, f"pair/{attention}/{turn}", ATTENTION_RANK, timeout)
    except RuntimeError as error:
        raise RendezvousError(
            f"{peer} did not take attention-{attention} in within {timeout:g} s; "
            "is another node of that index connected?"
        ) from error
    return Segment.private(SegmentMap(layout, expert, theirs["attention_nodes"]), attention, turn), pair
