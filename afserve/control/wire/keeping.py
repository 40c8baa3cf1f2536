"""What gateways and attention nodes say of requests that outlive a client's connection, or the gateway that it was to.

An attention node keeps such a request, with what its gateway needs to know of it, for whichever gateway asks by its id.
"""

from dataclasses import dataclass

MOST_ABOUT = 64 << 10  # bytes that a gateway may leave with each sequence of a request


@dataclass(frozen=True, slots=True)
class Keep:
    """Sequence `choice` of the `choices` of request `id`, which only its client knows.

    It is kept for `seconds` after its gateway has gone. `about` is the gateways' own: nobody else reads it.
    """

    id: str
    choice: int
    choices: int
    seconds: float
    about: bytes


@dataclass(frozen=True, slots=True)
class Halt:
    """To an attention node: no more tokens of this kept request; what there is stays kept."""

    request: int


@dataclass(frozen=True, slots=True)
class Claim:
    """To every attention node: say what you keep of request `id`. With `take` it is this gateway's from now on."""

    query: int
    id: str
    take: bool


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """One sequence that an attention node keeps. Of the first `bare` of its `count` tokens no log-probabilities.

    Its last `unheard` tokens came when no gateway was there, so none has charged anybody for them.
    """

    request: int
    prompt_ids: tuple[int, ...]
    count: int
    bare: int
    ended: bool
    keep: Keep
    unheard: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a `Claim`; what was taken says nothing until the gateway has sent `Resume`."""

    query: int
    answers: tuple[KeptAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """To a gateway: another one has taken these requests."""

    requests: tuple[int, ...]
