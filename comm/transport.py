"""The seam between experts and wires: a `Transport` moves messages between fixed mailboxes.

It knows boxes, headers and shapes; it knows no experts and no placement (those are in `m2n/`). One end is one node. An
attention node's end posts dispatches and takes combines; an expert node's end does the reverse.

Flow control is one rule: a box carries one dispatch and then one combine of the same sequence number, in turns. A
message therefore never overwrites one that is still being read, and memory is fixed at start.

Shapes: R rows in a message, H hidden size, K top-k, S scale blocks of 128 columns.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from afserve.credentials import NOBODYS, Credentials
from afserve.kernels.stack import Exchange, LayeredExperts
from afserve.member import NodeId, Role

NO_SLOT = -1
HOST = torch.device("cpu")
SCALE_BLOCK = 128


class Kind(IntEnum):
    """A REFUSAL takes a combine's place: the dispatch was not what a correct peer sends, and here is why."""

    DISPATCH = 1
    COMBINE = 2
    REFUSAL = 3


class WireType(IntEnum):
    """Element type of the rows in a message. FLOAT8 (e4m3) travels with one float32 scale per 1x128 block."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FLOAT8 = 4

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPE[self]


_DTYPE = {
    WireType.FLOAT32: torch.float32,
    WireType.BFLOAT16: torch.bfloat16,
    WireType.FLOAT16: torch.float16,
    WireType.FLOAT8: torch.float8_e4m3fn,
}


class Box(NamedTuple):
    """One mailbox pair. All three are indices from 0; the direction follows from who posts."""

    attention: int
    expert: int
    micro_batch: int

    @property
    def attention_node(self) -> NodeId:
        return NodeId(Role.ATTENTION, self.attention)

    @property
    def expert_node(self) -> NodeId:
        return NodeId(Role.EXPERT, self.expert)


class Header(NamedTuple):
    """What precedes a payload. `layer` counts MoE layers only. `rows` fixes the payload's size. `call`: rows of all
    attention nodes that were computed together with an answer's; 0 where nobody says."""

    kind: Kind
    epoch: int
    sequence: int
    layer: int
    rows: int
    wire: WireType
    call: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What both ends allocate for: agreed at rendezvous, checked on every received header.

    `model` is a fingerprint of what is served (`rendezvous.fingerprint`), 0 where nobody compares it. `exchange`: MoE
    layers of a step whose rows kernels at both ends send and await by themselves (`device_exchange/`); 0 for none.
    """

    hidden: int
    top_k: int
    max_rows: int
    micro_batches: int
    layers: int
    slots: int
    dispatch_wire: WireType
    combine_wire: WireType
    model: int = 0
    exchange: int = 0


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """What an expert node opens: its index, how many attention nodes may ever connect, the one address to listen on.

    Who connects has to have the token of `credentials`; with certificates, what leaves the host is encrypted, where the
    transport can.
    """

    expert: int
    attention_nodes: int
    layout: Layout
    host: str = "127.0.0.1"
    device: torch.device = HOST
    credentials: Credentials = NOBODYS


@dataclass(frozen=True, slots=True)
class Connecting:
    """What an attention node opens: its index, the expert nodes' addresses by index, and the seconds it may take."""

    addresses: Mapping[int, str]
    attention: int
    layout: Layout
    timeout: float
    device: torch.device = HOST
    credentials: Credentials = NOBODYS


class Parcel(NamedTuple):
    """A message's contents, valid until the next post on its box.

    A dispatch has x_RH, slot_RK (int32, NO_SLOT where a choice lives elsewhere) and weight_RK (float32);
    a combine has x_RH alone. scale_RS (float32) is there when x_RH is FLOAT8. What `take` returns of
    slot_RK and weight_RK is the receiver's own copy, so that a check made on it stays true.
    """

    header: Header
    x_RH: Tensor
    slot_RK: Tensor | None = None
    weight_RK: Tensor | None = None
    scale_RS: Tensor | None = None


class SharedRegion(NamedTuple):
    """Addresses of a box's memory for `device_exchange`: this end's, and the peer's, which it writes."""

    own: int
    peer: int
    keeper: object


class Dialled(Protocol):
    """A connection to an expert node that no boxes belong to yet; it is attached or closed, once."""

    @property
    def expert(self) -> int: ...

    def close(self) -> None: ...


class Transport(Protocol):
    """One node's end. Every method but `wait` and `dial` returns at once."""

    @property
    def layout(self) -> Layout: ...

    @property
    def device(self) -> torch.device:
        """Where rows lie in the mailboxes; headers are always in host memory."""

    @property
    def offers(self) -> "Offers":
        """What this transport does beside the contract."""

    def boxes(self) -> list[Box]:
        """Every box of this end, in order; on an attention node those of the expert nodes it is attached to."""

    def next_sequence(self, box: Box) -> int:
        """The number that the next dispatch on `box` has to carry."""

    def stage(self, box: Box, header: Header) -> Parcel:
        """Writable views of the box's outgoing mailbox, to be filled in place and then posted."""

    def post(self, box: Box) -> None:
        """Publish what was staged. Raises PeerLost if the other end is known to be gone."""

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        """Those of `boxes` that hold an incoming message which was not yet taken."""

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        """Park until one of `boxes` is ready, at most `timeout` seconds; may return an empty list.

        Raises PeerLost, naming the peer, when the other end of one of `boxes` is gone.
        """

    def take(self, box: Box) -> Parcel:
        """The incoming message, checked against the layout. Raises ProtocolError on anything else.

        On an attention node DispatchRefused when the expert node refused the dispatch; the message says why.
        """

    def refuse(self, box: Box, reason: str) -> None:
        """On an expert node: answer what was taken last from `box` with a refusal. Never raises PeerLost."""

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        """On an attention node, from any thread: connect to an expert node, for `attach`.

        Raises RendezvousError as `connect` does.
        """

    def attach(self, dialled: Dialled) -> None:
        """On an attention node: from now on also, or in a lost one's place, the expert node that was dialled."""

    def detach(self, expert: int) -> None:
        """On an attention node: leave an expert node; nothing may be under way to it."""

    def close(self) -> None: ...


class MessageFiller(Protocol):
    """Fills the messages of one dispatch, one for each expert node."""

    def fill(self, node: int, parcel: Parcel) -> None: ...

    def native(self, wire: WireType) -> tuple[object, int] | None:
        """The native library's form and the address of the weights, where rows travel in `wire` as they are."""


class Sender(Protocol):
    """What a transport may offer beside the contract: stage, fill and post in one call."""

    def send(
        self,
        box: Box,
        header: Header,
        x_RH: Tensor,
        slot_RK: Tensor | None = None,
        weight_RK: Tensor | None = None,
    ) -> None:
        """All rows as they lie; a combine has no slots and weights."""

    def send_part(self, box: Box, header: Header, filler: MessageFiller) -> None:
        """The rows that go to the box's expert node."""


class SharingCores(Protocol):
    """What a transport between two nodes of a host may offer: whoever waits lends its core to the other."""

    def share_cores(self, borrow: Callable[[Tensor | None, int], bool]) -> bool:
        """`borrow` is given the memory and the offset of the peer's bell, as `Ops.borrow_core`, now and whenever the
        peer is another process, and no memory once there is no such peer. False where nobody lends here: no native
        library, or more than one peer.
        """


class Answered(NamedTuple):
    """Dispatches of one box that were answered one after the other: how many, their rows, the seconds of computing
    them; the header of the last one, and its part of the seconds."""

    box: Box
    messages: int
    rows: int
    seconds: float
    last: Header
    last_seconds: float


class AnsweringLoop(Protocol):
    """What a transport may offer an expert node beside the contract: wait, take, compute and post again and again in
    one call, without Python between two messages."""

    def answer(
        self,
        experts: LayeredExperts,
        epochs: Collection[int],
        most_rows: Callable[[int], int],
        wait: float,
        serve: float,
    ) -> Answered | None:
        """Wait `wait` seconds at most for a dispatch of one of `epochs`, of no more rows than `most_rows` says of its
        attention node; answer it, and those that follow on its box, for `serve` seconds. Whatever else comes ends this,
        and is there for `ready`. `experts` is what `Ops.expert_layers` made. None where nothing was answered.
        """


class Exchanging(Protocol):
    """What a transport may offer an attention node beside the contract: `Ops.run_stack` sends and waits by itself."""

    def exchange(
        self, boxes: Sequence[Box], routes: Sequence[object], epoch: int, patience: float
    ) -> Exchange | None:
        """For one micro-batch: its boxes by expert node, and the native library's routes of every MoE layer, which the
        caller keeps. An answer may take `patience` seconds, or is left to the caller. None where the transport or its
        wires have no such thing. Good until an expert node is attached or detached."""

    def exchanged(self, boxes: Sequence[Box]) -> list[int]:
        """Messages went through an exchange on these boxes: the numbers of the last ones."""

    def last_answers(self, boxes: Sequence[Box]) -> list[tuple[int, int]]:
        """Rows of the last answers that came there, and of their calls (`Header.call`)."""


Queue = Callable[[], AbstractContextManager[None]]
"""Of a device: what is launched inside the context is in it."""


class Queueing(Protocol):
    """What a transport may offer beside the contract where a device waits for payloads by itself."""

    def take_in(self, attention: int, queue: Queue) -> None:
        """From now on the device waits for what an attention node sends inside `queue`, so that no other queue does."""


class Limiting(Protocol):
    """What a transport may offer beside the contract: the memory of a box follows what its attention node may send."""

    def limit(self, attention: int, rows: int) -> None:
        """From now on the messages of an attention node have at most so many rows, also over boxes that come later.

        A larger one that is under way is carried as ever; what it took in memory goes with the box's next message.
        """


class SharingRegions(Protocol):
    """What a transport may offer beside the contract: memory that kernels of both ends of a box use by themselves."""

    def region(self, box: Box) -> SharedRegion | None:
        """None while its peer is not there."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What a transport does beside the contract; None is what it does not. Whoever holds it asks once, at
    wiring."""

    sender: Sender | None = None
    limiting: Limiting | None = None
    queueing: Queueing | None = None
    answering: AnsweringLoop | None = None
    exchanging: Exchanging | None = None
    sharing_cores: SharingCores | None = None
    regions: SharingRegions | None = None
