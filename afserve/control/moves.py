"""What moving a gateway's requests to another attention node cost: how many, why, and how long each had no token.

It is told of moves and of tokens; times are passed in. It knows no streams.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from afserve.control.requests import Request
from afserve.member import Life

_LIVES = 100  # of nodes, whose waits are remembered


@dataclass(frozen=True, slots=True)
class _Move:
    cause: str
    left: Life
    since: float


class Moves:
    """`counts` are requests by cause; `seconds` their waits from the move to the next token, summed.

    `longest` is the longest wait of those that left a life of a node.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.longest: dict[Life, float] = {}
        self._under_way: dict[Request, _Move] = {}

    def moved(self, request: Request, left: Life, cause: str, now: float) -> None:
        """One that is moved again before its next token has waited since the first of these moves."""
        self.counts[cause] += 1
        self._under_way.setdefault(request, _Move(cause, left, now))

    @property
    def moving(self) -> bool:
        """Whether any request waits for its next token."""
        return bool(self._under_way)

    def stall_of(self, node: str, generation: int) -> float:
        """The longest wait of the requests that left this life of a node."""
        lives = (life for life in self.longest if (str(life), life.generation) == (node, generation))
        return max((self.longest[life] for life in lives), default=0.0)

    def came(self, request: Request, now: float) -> None:
        """A token, or the end."""
        if (move := self._under_way.pop(request, None)) is not None:
            waited = now - move.since
            self.seconds[move.cause] += waited
            self.longest[move.left] = max(waited, self.longest.pop(move.left, 0.0))
            while len(self.longest) > _LIVES:
                del self.longest[next(iter(self.longest))]

    def closed(self, request: Request) -> None:
        """Its client has gone: nobody waits."""
        self._under_way.pop(request, None)
