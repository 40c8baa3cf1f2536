"""Connections between attention nodes as numbered peers: the seam between the protocol of KV blocks and sockets.

A number is never used again. What is sent before a connection stands goes out when it does.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from afserve.comm.kv.messages import Message
from afserve.comm.kv.rooms import Room


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message of a peer."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Closed:
    """This connection has ended, or never stood. Said once."""

    peer: int
    why: str


Event = PeerMessage | Closed


class Wires(ABC):
    """All calls come from one thread; none waits. What is here already is so where another thread serves them."""

    @abstractmethod
    def dial(self, address: str) -> int:
        """A peer's number, at once; who does not answer, or does not agree, is Closed later."""

    @abstractmethod
    def send(self, peer: int, message: Message) -> None:
        """To a peer whose connection has ended, nothing."""

    def has_room(self, peer: int) -> bool:
        """Whether the bytes of one more piece may be under way to it. Who waits for that is woken."""
        return True

    def takes_large(self, peer: int) -> bool:
        """Whether a piece may be a large one. The other end takes all, who sends them thinks of time and memory."""
        return False

    def room(self, peer: int, size: int) -> Room:
        """Memory for them, where it `has_room`: a Piece is made over it and sent."""
        return Room(memoryview(bytearray(size)))

    @abstractmethod
    def receive(self, keep: bool = False) -> list[Event]:
        """What has happened since the last call. Who is to `keep` all connections to itself calls again at once, or
        says that it does not."""

    def give_way(self) -> None:  # noqa: B027  nothing, unless it says otherwise
        """The caller looks for what comes, and lets others have its core. Where the other end has, it goes on apart."""

    def apart(self, peer: int) -> None:  # noqa: B027  nothing, unless it says otherwise
        """Much will go there: not from the core where that end waits for it."""

    def leave(self) -> None:  # noqa: B027  nothing, unless it says otherwise
        """The caller has something else to do, or will wait."""

    @property
    def kept(self) -> bool:
        """Whether there is anything that nobody but the caller looks at: it calls again before it waits."""
        return False

    @property
    def moving(self) -> bool:
        """Whether a part of a message came at the last `receive`."""
        return False

    def used(self, said: PeerMessage) -> None:  # noqa: B027  nothing, unless it says otherwise
        """Nobody looks at the bytes of this message any more."""

    @abstractmethod
    def close(self) -> None:
        """All connections."""
