"""All mailboxes of one end, over one segment or several: the part of a transport that never blocks.

`local` and `shm` add only their way of waiting. It knows flags and sequence numbers; it knows no processes. Where the
native library is built, it writes, posts and checks whole messages. A message that fails the native check is read again
in Python, which names the wrong field.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from afserve.comm.mailbox.flags import BellWord, Board, MessageBoard, open_board
from afserve.comm.mailbox.mailbox import Mailbox
from afserve.comm.mailbox.segment import Segment
from afserve.comm.mailbox.wire import SEQUENCES, following, name
from afserve.comm.native import CODES, native_library
from afserve.comm.transport import Answered, Box, Header, Kind, MessageFiller, Parcel
from afserve.errors import ProtocolError
from afserve.kernels.stack import Exchange, LayeredExperts

KEPT_BYTES = 1 << 30  # of all mailboxes of an end; what larger messages leave beyond it is given back
_LATE = 1 << 16  # dispatches that may have been abandoned since the one whose answer arrives now


@dataclass(slots=True)
class _Lane:
    """`sent` and `taken` are the sequence numbers of the last message out and in; `staged` waits for its post. `rows`
    are those of the largest message whose pages are still in memory.
    """

    box: Box
    segment: Segment
    index: int
    out: Mailbox
    incoming: Mailbox
    sent: int
    taken: int
    staged: int
    most: int  # rows that messages usually have at most: the pages of longer ones are not kept
    staged_rows: int = 0
    rows: int = 0

    def bytes(self, rows: int) -> int:
        """That dispatches and answers of `rows` rows touch."""
        return self.out.frame.span(rows).end + self.incoming.frame.span(rows).end


class Lanes:
    """`attention` is this node's index, or None on an expert node.

    An attention node carries on the numbers that it finds, so that it may take the place of one that died: a late
    reply to its predecessor bears an older number and is passed over.

    Whoever `owns` the memory keeps it bounded. What large messages touched stays, for others as large, up to the limit
    of the attention node; but once that is more than KEPT_BYTES in all, a box gives the pages behind its next message
    back. By then the answer before it was read, so nothing is lost.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        attention: int | None,
        *,
        spins: bool = True,
        owns: bool | None = None,
    ) -> None:
        """An expert node owns its memory, an attention node where it says so."""
        self._owns = attention is None if owns is None else owns
        self.kept = 0  # bytes of mailboxes that messages have touched and nobody has given back
        self._attention = attention
        self._attention_side = attention is not None
        self._spins = spins
        self._limits: dict[int, int] = {}  # rows, by attention node
        self._watched: tuple[int, int] | None = None
        self._lanes: dict[Box, _Lane] = {}
        self.rebuild(segments)

    def limit(self, attention: int, rows: int) -> None:
        """As `transport.Limiting`."""
        self._limits[attention] = rows
        for lane in self._by_index:
            if lane.box.attention == attention:
                lane.most = rows

    def rebuild(self, segments: Sequence[Segment]) -> None:
        """From now on these segments; the boxes of those that stay go on as they are."""
        lanes = [self._lane(one, box) for one in segments for box in one.map.boxes(self._attention)]
        words = [lane.segment.lane_words(lane.box, attention_side=self._attention_side) for lane in lanes]
        bells = [segment.bell(self._attention) for segment in segments]
        self._board: Board = open_board(words, bells, spins=self._spins)
        if self._watched is not None:
            self._board.watch(*self._watched)
        self._lanes = {lane.box: lane for lane in lanes}
        self.kept = sum(lane.bytes(lane.rows) for lane in lanes if lane.rows)
        self._known: tuple[Box, ...] | None = None
        self._known_indices: list[int] = []
        self._by_index = lanes
        for index, lane in enumerate(lanes):
            lane.index = index
            self._board.settle(index, lane.taken)
        self._carrier = self._load(lanes)
        # A carrier passes late answers over by itself.
        self._asks = self._attention_side and self._carrier is None

    def _load(self, lanes: Sequence[_Lane]) -> MessageBoard | None:
        """The board, when it can move the messages of all lanes."""
        board = self._board
        if not isinstance(board, MessageBoard) or any(None in _handles(lane) for lane in lanes):
            return None
        for lane in lanes:
            slot, weight = (0, 0) if self._attention_side else lane.incoming.own_addresses
            board.carry(lane.index, *_handles(lane), slot, weight, lane.sent)
        return board

    def _lane(self, segment: Segment, box: Box) -> _Lane:
        known = self._lanes.get(box)
        if known is not None and known.segment is segment:
            return known
        out, incoming = Kind.DISPATCH, Kind.COMBINE
        if not self._attention_side:
            out, incoming = incoming, out
        sent, taken = segment.word(box, out), segment.word(box, incoming)
        if self._attention_side and sent != taken:
            sent = following(sent)  # a predecessor's dispatch is still unanswered: stay clear of its number
        boxes = segment.mailbox(box, out), segment.mailbox(box, incoming)
        most = self._limits.get(box.attention, segment.map.layout.max_rows)
        return _Lane(box, segment, 0, *boxes, sent, taken, sent, most)

    def lend(self, own: BellWord, peer: BellWord) -> bool:
        """From now on a wait lends this end's core where somebody wants it, and the peer of that bell does the same.
        False where the native library is missing. Until the next `rebuild`."""
        if not isinstance(self._board, MessageBoard):
            return False
        self._board.lend(own.address, peer.address)
        return True

    def watch(self, files: int, door: int) -> None:
        """As `Board.watch`, also after the next `rebuild`."""
        self._watched = files, door
        self._board.watch(files, door)

    def boxes(self) -> list[Box]:
        return list(self._lanes)

    def next_sequence(self, box: Box) -> int:
        return following(self._lanes[box].sent)

    def stage(self, box: Box, header: Header) -> Parcel:
        lane = self._lanes[box]
        self._next(lane, header)
        lane.staged_rows = header.rows
        return lane.out.stage(header)

    def _keep(self, lane: _Lane, rows: int) -> None:
        """A dispatch of `rows` rows begins: nothing else in the mailboxes of its box is needed any more."""
        if not lane.segment.gives_back:
            return
        if rows < lane.rows:
            if self.kept <= KEPT_BYTES:
                if lane.rows <= lane.most:
                    return
                rows = max(rows, lane.most)
            lane.segment.release_pages(lane.box, rows)
        self.kept += lane.bytes(rows) - lane.bytes(lane.rows)
        lane.rows = rows

    def _next(self, lane: _Lane, header: Header) -> None:
        expected = following(lane.sent) if self._attention_side else lane.taken
        assert header.sequence == expected, f"sequence {header.sequence} staged, {expected} is next"
        lane.staged = header.sequence

    def post(self, box: Box) -> bool:
        """False when the message was posted already."""
        lane = self._lanes[box]
        if lane.sent == lane.staged:
            return False
        if self._attention_side:
            lane.taken = self._board.value(lane.index)
            self._board.settle(lane.index, lane.taken)
            if self._owns and lane.staged_rows != lane.rows:
                self._keep(lane, lane.staged_rows)
        lane.sent = lane.staged
        self._board.post(lane.index, lane.sent)
        return True

    def send(
        self, box: Box, header: Header, x_RH: Tensor, slot_RK: Tensor | None, weight_RK: Tensor | None
    ) -> None:
        """stage, fill and post in one; all rows as they lie."""
        assert len(x_RH) == header.rows, f"{len(x_RH)} rows sent as {header.rows}"
        lane, carrier = self._lanes[box], self._carrier
        if carrier is None or not lane.out.fits_native(x_RH, slot_RK, weight_RK):
            lane.out.fill(self.stage(box, header), x_RH, slot_RK, weight_RK)
            self.post(box)
            return
        self._next(lane, header)
        slot, weight = _address(slot_RK), _address(weight_RK)
        _, epoch, number, layer, rows, *_ = header
        x, stride = x_RH.data_ptr(), lane.out.frame.row_bytes
        lane.taken = carrier.send_rows(lane.index, number, epoch, layer, rows, x, stride, slot, weight)
        lane.sent = number

    def send_part(self, box: Box, header: Header, filler: MessageFiller) -> None:
        """stage, fill and post in one; those rows of a dispatch that go to the box's expert node."""
        split = None if self._carrier is None else filler.native(header.wire)
        if self._carrier is None or split is None:
            filler.fill(box.expert, self.stage(box, header))
            self.post(box)
            return
        lane = self._lanes[box]
        self._next(lane, header)
        _, epoch, number, layer, *_ = header
        lane.taken = self._carrier.send_split(lane.index, number, epoch, layer, *split, box.expert)
        lane.sent = number

    def outgoing(self, box: Box) -> Mailbox:
        return self._lanes[box].out

    def incoming(self, box: Box) -> Mailbox:
        return self._lanes[box].incoming

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        return self._fresh(self._board.changed(self._indices(boxes)))

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        return self._fresh(self._board.wait(self._indices(boxes), timeout))

    def take(self, box: Box) -> Parcel:
        """Whatever came, it counts as taken, so that a message which is refused is refused once."""
        lane = self._lanes[box]
        parcel = self._taken(lane)
        if self._owns and not self._attention_side and parcel.header.rows != lane.rows:
            self._keep(lane, parcel.header.rows)
        return parcel

    def answer(
        self,
        experts: LayeredExperts,
        epochs: Collection[int],
        most_rows: Callable[[int], int],
        wait: float,
        serve: float,
    ) -> Answered | None:
        """As `transport.AnsweringLoop`. A message that needs more memory than its box has kept is not answered here."""
        if self._carrier is None or self.kept > KEPT_BYTES:
            return None
        for lane in self._by_index:
            lane.out.tell_no_call()
        most = [min(most_rows(lane.box.attention), lane.rows, lane.most) for lane in self._by_index]
        found = self._carrier.answer(experts, list(epochs), most, wait, serve)
        if found is None:
            return None
        index, messages, rows, seconds, number, epoch, layer, last_rows, last_seconds = found
        lane = self._by_index[index]
        lane.taken = lane.staged = lane.sent = number
        frame = lane.incoming.frame
        last = Header(frame.kind, epoch, number, layer, last_rows, frame.wire)
        return Answered(lane.box, messages, rows, seconds, last, last_seconds)

    def exchange(
        self, boxes: Sequence[Box], routes: Sequence[object], epoch: int, patience: float
    ) -> Exchange | None:
        """As `transport.Exchanging`."""
        native, board, layout = native_library(), self._carrier, self._lanes[boxes[0]].segment.map.layout
        rows, sums = (CODES.get(wire.dtype) for wire in (layout.dispatch_wire, layout.combine_wire))
        if native is None or board is None or self._owns or rows is None or sums is None:
            return None
        return Exchange(native.Exchange(board, self._indices(boxes), list(routes), epoch, sums, patience))

    def exchanged(self, boxes: Sequence[Box]) -> list[int]:
        """As `transport.Exchanging`."""
        board = self._carrier
        assert board is not None, "an exchange without a board that carries messages"
        for box in boxes:
            lane = self._lanes[box]
            lane.sent = lane.staged = board.sent(lane.index)
            lane.taken = board.taken(lane.index)
        return [self._lanes[box].sent for box in boxes]

    def last_answers(self, boxes: Sequence[Box]) -> list[tuple[int, int]]:
        """As `transport.Exchanging`."""
        return [self._lanes[box].incoming.last_answer() for box in boxes]

    def _taken(self, lane: _Lane) -> Parcel:
        if self._carrier is not None:
            good, lane.taken, epoch, layer, rows = self._carrier.take(lane.index)
            if good and (lane.taken == lane.sent or not self._attention_side):
                return lane.incoming.taken(epoch, lane.taken, layer, rows)
        else:
            lane.taken = self._board.value(lane.index)
            self._board.settle(lane.index, lane.taken)
        if self._attention_side and lane.taken != lane.sent:
            raise ProtocolError(f"{name(lane.box)}: flag is {lane.taken}, expected {lane.sent}")
        return lane.incoming.read(lane.taken)

    def refuse(self, box: Box, reason: str) -> None:
        lane = self._lanes[box]
        lane.out.refuse(lane.taken, reason)
        lane.sent = lane.staged = lane.taken
        self._board.post(lane.index, lane.sent)

    def _indices(self, boxes: Sequence[Box]) -> list[int]:
        """Kept for a tuple, which somebody asks about again and again."""
        if boxes is self._known:
            return self._known_indices
        indices = [self._lanes[box].index for box in boxes]
        if isinstance(boxes, tuple):
            self._known, self._known_indices = boxes, indices
        return indices

    def _fresh(self, found: Sequence[int]) -> list[Box]:
        boxes = []
        for index in found:
            lane = self._by_index[index]
            if self._asks and self._passed_over(lane):
                continue
            boxes.append(lane.box)
        return boxes

    def _passed_over(self, lane: _Lane) -> bool:
        """True for the late answer to an abandoned dispatch: its number is a little older than the last one sent."""
        value = self._board.value(lane.index)
        if not 0 < (lane.sent - value) % SEQUENCES < _LATE:
            return False
        lane.taken = value
        self._board.settle(lane.index, value)
        return True


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _handles(lane: _Lane) -> tuple[object, object]:
    """None for a mailbox that the native library cannot write."""
    return lane.out.handle, lane.incoming.handle
