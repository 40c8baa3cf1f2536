"""What an attention node keeps of each request until its gateway has acknowledged the end: the answer so far.

A gateway whose stream broke is told, when it is back, what it has missed. A gateway that stays away for longer than a
grace takes its requests along. It knows no sockets and no engine.
"""

from array import array
from dataclasses import dataclass, field, replace

from afserve.clock import Clock
from afserve.control.wire.values import Held, Refused, gateway_of
from afserve.engine.request import GenerationRequest, TokenEvent, TokenLogprob
from afserve.errors import AfserveError, PeerError


@dataclass(slots=True)
class Kept:
    """One request's answer. It began with `base` tokens from elsewhere, which are not among `tokens`.

    While it is not `told`, its gateway has not said from where on to go on, and events are only kept.
    """

    base: int
    told: bool = True
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first: TokenEvent | None = None
    last: TokenEvent | None = None  # the one that ends it
    refusal: AfserveError | None = None

    @property
    def count(self) -> int:
        return self.base + len(self.tokens)

    def add(self, event: TokenEvent) -> None:
        if self.first is None:
            self.first = event
        self.tokens.extend(event.token_ids)
        if event.logprobs:
            self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.last = event

    def since(self, start: int) -> TokenEvent | None:
        """Everything from token `start` of the answer on, as one event; None where there is nothing yet."""
        if self.first is None or (start >= self.count and self.last is None):
            return None
        skipped = start - self.base
        end = self.last or TokenEvent(self.first.handle, ())
        begun = skipped > 0
        return replace(
            end,
            token_ids=tuple(self.tokens[skipped:]),
            logprobs=tuple(self.logprobs[skipped:]),
            prompt_logprobs=() if begun else self.first.prompt_logprobs,
            cached_tokens=0 if begun else self.first.cached_tokens,
        )


class KeptRequests:
    """All of a node, by number. `grace` in seconds."""

    def __init__(self, grace: float, clock: Clock) -> None:
        self._grace = grace
        self._clock = clock
        self._kept: dict[int, Kept] = {}
        self._away: dict[int, float] = {}  # since when a gateway has no stream

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def open(self, request: GenerationRequest) -> None:
        self._kept[request.handle] = Kept(len(request.generated))

    def close(self, number: int) -> None:
        """May be said again, and of what was never here."""
        self._kept.pop(number, None)

    def add(self, event: TokenEvent) -> bool:
        """Whether its gateway is to be told now. What was cancelled is of nobody's interest."""
        kept = self._kept.get(event.handle)
        if kept is None:
            return False
        kept.add(event)
        return kept.told

    def refuse(self, number: int, error: AfserveError) -> None:
        self._kept[number].refusal = error

    # ---- gateways

    def of(self, gateway: int) -> list[int]:
        return [number for number in self._kept if gateway_of(number) == gateway]

    def held(self, gateway: int) -> tuple[Held, ...]:
        """What to say first on a new stream to this gateway."""
        return tuple(Held(number, self._kept[number].count) for number in self.of(gateway))

    def left(self, gateway: int) -> None:
        """Its stream has ended. May be said again while it is away."""
        self._away.setdefault(gateway, self._clock.now())
        for number in self.of(gateway):
            self._kept[number].told = False

    def is_back(self, gateway: int) -> None:
        self._away.pop(gateway, None)

    def resume(self, number: int, start: int) -> TokenEvent | Refused | None:
        """What its gateway has missed; from now on it is told everything."""
        kept = self._kept.get(number)
        if kept is None or not kept.base <= start <= kept.count:
            return Refused(number, PeerError(f"token {start} of request {number} is not kept here"))
        missed = Refused(number, kept.refusal) if kept.refusal is not None else kept.since(start)
        kept.told = True
        return missed

    def orphans(self) -> list[int]:
        """Requests of gateways that have been away for longer than the grace; said once."""
        if not self._away:
            return []
        now = self._clock.now()
        gone = [gateway for gateway, since in self._away.items() if now - since >= self._grace]
        for gateway in gone:
            del self._away[gateway]
        return [number for gateway in gone for number in self.of(gateway)]
