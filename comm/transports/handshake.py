"""How an attention node joins an expert node, once each has proved itself: terms, who it is, and its turn.

The turn is how many nodes have had that index, this one included: numbers of messages begin there. `Seats` decides,
at the expert node, whether a newcomer takes the place of whoever has it.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from afserve import member
from afserve.comm.mailbox.rendezvous import FIELDS, compare, terms
from afserve.comm.mailbox.segment import SegmentMap
from afserve.comm.transport import Connecting
from afserve.comm.transports import greeting
from afserve.comm.transports.encrypted import Connection
from afserve.comm.transports.entrance import Newcomer
from afserve.errors import RendezvousError

log = logging.getLogger("afserve.comm")
PURPOSE = "rows 2"
_ATTENTION, _GENERATION, _TURN, _NAME, _REFUSED = "attention", "generation", "turn", "name", "refused"
_MOST_TURNS = 1 << 32


@dataclass(frozen=True, slots=True)
class ExpertConnection:
    """A connection to an expert node that has taken this node in. `name` is of this connection alone, and random."""

    connection: Connection
    turn: int
    name: str


class SeatHolder(Protocol):
    """Whoever has a place: `lost` says why it has it no more."""

    @property
    def lost(self) -> str | None: ...


class Ending(SeatHolder, Protocol):
    """What can be let in, or ended."""

    def end(self, why: str) -> None: ...


AnyHeld = TypeVar("AnyHeld", bound=Ending)


@dataclass(eq=False, slots=True)
class _Coming:
    """Greeted, and not let in yet."""

    lost: str | None = None


def ask(dial: Callable[[float], Connection], expert: int, to: Connecting) -> ExpertConnection:
    """By a connection that `dial` makes, given the seconds that are left. Raises AuthError or RendezvousError naming
    the expert node and what is wrong."""
    peer, attention, credentials = str(member.expert_node(expert)), to.attention, to.credentials
    mine, me = (
        terms(to.layout, expert=expert, attention_nodes=attention + 1),
        member.attention_node(attention),
    )
    words = _texts(mine) | {_ATTENTION: str(attention), _GENERATION: str(credentials.generation)}
    connection, said = greeting.greet(dial, credentials.token, PURPOSE, words, peer, to.timeout)
    try:
        theirs, turn = _numbers(said), _number(said, _TURN)
        nodes = max(theirs["attention_nodes"], attention + 1)
        compare({**mine, "attention_nodes": nodes}, theirs, me=str(me), peer=peer)
        if not 0 < turn < _MOST_TURNS:
            raise RendezvousError(f"{peer} did not take {me} in: {said.get(_REFUSED, 'it does not say why')}")
    except BaseException:
        connection.close()
        raise
    return ExpertConnection(connection, turn, said.get(_NAME, ""))


class Seats:
    """Of all attention nodes that may ever come to one expert node; `where` says how many."""

    def __init__(self, where: SegmentMap, token: str) -> None:
        self._where, self._token = where, token
        self._terms = terms(where.layout, expert=where.expert, attention_nodes=where.attention_nodes)
        self._turns = [0] * where.attention_nodes
        self._holders: dict[int, tuple[SeatHolder, int]] = {}  # with its generation
        self._deciding = threading.Lock()

    def admit(
        self, newcomer: Newcomer, meet: Callable[[int, str], AnyHeld], let_in: Callable[[int, AnyHeld], None]
    ) -> None:
        """By a newcomer's own thread: greets it, gives it its place, and lets in what `meet(attention, name)` makes of
        it. That may take long, and holds up only nodes of the same index. Raises what the greeting or `meet` raises, or
        RendezvousError; where it has no place it is told why."""
        caller = greeting.listen(newcomer.connection, self._token, PURPOSE, newcomer.until)
        newcomer.proven()
        coming = _Coming()
        with self._deciding:
            try:
                attention, generation = self._checked(caller.words)
            except RendezvousError as error:
                caller.send_answer(_texts(self._terms) | {_TURN: "0", _REFUSED: error.message})
                raise
            self._turns[attention] += 1
            name = secrets.token_hex(16)
            caller.send_answer(_texts(self._terms) | {_TURN: str(self._turns[attention]), _NAME: name})
            self._holders[attention] = coming, generation
        try:
            held = meet(attention, name)
        except BaseException:
            coming.lost = "it did not come"
            raise
        with self._deciding:
            if self._holders[attention][0] is not coming:
                held.end("another one has taken its place")
                raise RendezvousError("a later life of the same node has taken its place")
            self._holders[attention] = held, generation
            let_in(attention, held)

    def _checked(self, words: greeting.Words) -> tuple[int, int]:
        """Who may come in. Raises RendezvousError."""
        theirs, attention = _numbers(words), _number(words, _ATTENTION)
        here = str(member.expert_node(self._where.expert))
        if not 0 <= attention < len(self._turns):
            raise RendezvousError(f"{here} has places for {len(self._turns)} attention nodes")
        name = str(member.attention_node(attention))
        compare(self._terms, {**theirs, "attention_nodes": len(self._turns)}, me=here, peer=name)
        generation = _number(words, _GENERATION)
        self._vacate(attention, generation, name)
        return attention, generation

    def _vacate(self, attention: int, generation: int, name: str) -> None:
        """Only an earlier life of the same node gives way."""
        holder, before = self._holders.get(attention, (None, -1))
        if holder is None or holder.lost is not None:
            return
        if generation <= before:
            raise RendezvousError(f"another node of that index is connected, of generation {before}")
        log.warning("%s: generation %d takes the place of %d, which is connected", name, generation, before)


def _texts(values: dict[str, int]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _numbers(words: greeting.Words) -> dict[str, int]:
    return {name: _number(words, name) for name in FIELDS}


def _number(words: greeting.Words, name: str) -> int:
    """Raises RendezvousError where it says none."""
    text = words.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise RendezvousError(f"a greeting says {text[:40]!r} for {name}, which is no number")
    return int(text)
