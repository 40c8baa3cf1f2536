"""What gateways and attention nodes say to each other of requests, as plain frozen values; `request_messages.py` is how
they travel.

Requests are numbers on this plane: gateways hand them out. Nothing here knows gRPC, torch or processes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from afserve.comm.kv.source import KvSource
from afserve.control.wire.cache_values import AskCache, KeptCache
from afserve.control.wire.keeping import Claim, Claimed, Given, Halt, Keep
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.errors import AfserveError
from afserve.member import AttentionLife

_TOGETHER = 1 << 20  # bytes of experts in one message of several events

# ---- attention node to gateway


@dataclass(frozen=True, slots=True)
class Held:
    """A request that an attention node keeps. `count` tokens of the answer are there, those it began with included.

    One that is `kept` for whoever asks for it stays where no present request of the gateway has its number.
    """

    request: int
    count: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Attend:
    """The first message of a stream: which life of an attention node this is, with what of this gateway's.

    The gateway answers each of `held` with `Resume` or `Cancel`; until then the node says nothing about it. `stream`
    counts this life's streams: what an earlier one says late is dropped.
    """

    life: AttentionLife
    held: tuple[Held, ...] = ()
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Events of one step, each with its request's handle."""

    events: tuple[TokenEvent, ...]

    @classmethod
    def split(cls, events: Iterable[TokenEvent]) -> Iterator["Tokens"]:
        """All of them, in order. What has experts of long prompts fits a message where others' are in the next."""
        part: list[TokenEvent] = []
        size = 0
        for event in events:
            more = 0 if event.routed is None else len(event.routed.data)
            if part and more and size + more > _TOGETHER:
                yield cls(tuple(part))
                part, size = [], 0
            part.append(event)
            size += more
        yield cls(tuple(part))


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Which beginnings of prompts this node's cache has, by the keys of `engine/kv/prefix_keys`: those that came and
    went since it said so last. With `anew`, what was said before counts no more."""

    came: tuple[int, ...] = ()
    went: tuple[int, ...] = ()
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    request: int
    error: AfserveError


# ---- gateway to attention node

# The upper bits of a request's number say whose it is, so that no two gateways give out the same. Those below say in
# which life of the gateway: nodes may still keep what an earlier one left.
_GATEWAY_BITS, _LIFE_BITS, _MOST_LIVES = 40, 28, 1 << 12


def first_request(gateway: int, generation: int = 0) -> int:
    """The numbers that a gateway gives out begin here."""
    return (gateway << _GATEWAY_BITS) + (generation % _MOST_LIVES << _LIFE_BITS) + 1


def gateway_of(request: int) -> int:
    return request >> _GATEWAY_BITS


def is_of_life(request: int, gateway: int, generation: int) -> bool:
    """Whether this life of this gateway gave out the number."""
    return request >> _LIFE_BITS == first_request(gateway, generation) >> _LIFE_BITS


@dataclass(frozen=True, slots=True)
class Submit:
    """`kv_from` where the request has been computed elsewhere, and that node is still there, or is to be."""

    request: GenerationRequest
    kv_from: KvSource | None = None
    keep: Keep | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """`parts`: it goes on at another node, which may ask for its KV."""

    request: int
    parts: bool = False


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The gateway has the last event of these requests: the node may forget them."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a request that the node holds, from token `start` of the answer on."""

    request: int
    start: int


FromAttention = Attend | Tokens | Refused | Claimed | Given | Prefixes | KeptCache
ToAttention = Submit | Cancel | Acknowledge | Resume | Halt | Claim | AskCache
