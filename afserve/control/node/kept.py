"""What an attention node keeps of each request until its gateway has acknowledged the end: the answer so far.

A gateway whose stream broke is told, when it is back, what it has missed. A gateway that stays away for longer than a
grace takes its requests along, but for those that are to outlive it: they wait for a gateway that asks for them, for as
long as they say themselves. It knows no sockets and no engine.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from afserve.clock import Clock
from afserve.control.node.journal import LEFT, Journal, Stay
from afserve.control.wire.keeping import Keep, KeptAnswer
from afserve.control.wire.request_values import Held, Refused, gateway_of
from afserve.engine.scheduling.found_below import NONE_BELOW
from afserve.engine.scheduling.request import (
    NOT_PREDICTED,
    GenerationRequest,
    Predicted,
    TokenEvent,
    TokenLogprob,
    sum_predicted,
)
from afserve.engine.scheduling.routed_experts import RoutedExperts, joined
from afserve.errors import AfserveError, PeerError


@dataclass(slots=True)
class KeptRequest:
    """One request's answer. It began with `base` tokens from elsewhere, which are not among `tokens`.

    Of one that is to outlive its gateway all tokens are there; the first `bare` came from elsewhere. While it is not
    `told`, its gateway has not said from where on to go on, and events are only kept: those behind token `heard`.
    """

    number: int
    gateway: int
    stay: Stay
    base: int = 0
    bare: int = 0
    keep: Keep | None = None
    prompt_ids: tuple[int, ...] = ()
    told: bool = True
    heard: int = 0
    halted: bool = False
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    predicted: list[tuple[int, Predicted]] = field(default_factory=list)  # behind how many tokens
    routed: list[RoutedExperts] = field(default_factory=list)
    first: TokenEvent | None = None
    last: TokenEvent | None = None  # the one that ends it
    refusal: AfserveError | None = None

    @property
    def count(self) -> int:
        return self.base + len(self.tokens)

    @property
    def unheard(self) -> int:
        return 0 if self.told else self.count - self.heard

    def pause(self) -> None:
        """No gateway is told until one has said from where on."""
        if self.told:
            self.told, self.heard = False, self.count

    def add(self, event: TokenEvent, journal: Journal) -> None:
        if self.first is None:
            self.first = event
            journal.answered(self.stay, event.queued, event.cached_tokens)
        self.tokens.extend(event.token_ids)
        if event.predicted is not NOT_PREDICTED:
            self.predicted.append((self.count, event.predicted))
        if event.logprobs:
            self.logprobs += event.logprobs
        if event.routed is not None:
            self.routed.append(event.routed)
        if event.finish_reason is not None:
            self.last = event
            journal.ended(self.stay, self.drawn, event.finish_reason, failed=event.finish_reason == "error")

    @property
    def drawn(self) -> int:
        """Tokens that were not here before."""
        return len(self.tokens) - self.bare

    def since(self, start: int) -> TokenEvent | None:
        """Everything from token `start` of the answer on, as one event; None where there is nothing yet."""
        if start >= self.count and self.last is None:
            return None
        skipped = start - self.base
        end = self.last or TokenEvent(self.number, ())
        first = None if skipped > 0 else self.first
        routed = joined(self.routed)
        if routed is not None and skipped > self.bare:
            routed = routed.last(self.count - start)
        return replace(
            end,
            token_ids=tuple(self.tokens[skipped:]),
            logprobs=tuple(self.logprobs[max(0, skipped - self.bare) :]),
            prompt_logprobs=() if first is None else first.prompt_logprobs,
            cached_tokens=0 if first is None else first.cached_tokens,
            found_below=NONE_BELOW if first is None else first.found_below,
            queued=0.0 if first is None else first.queued,
            predicted=sum_predicted(of for behind, of in self.predicted if behind > start),
            routed=routed,
        )

    @property
    def ended(self) -> bool:
        return self.halted or self.last is not None or self.refusal is not None


class KeptRequests:
    """All of a node, by number. `grace` in seconds."""

    def __init__(self, grace: float, clock: Clock, journal: Journal | None = None) -> None:
        self._grace = grace
        self._journal = journal or Journal()
        self._clock = clock
        self._kept: dict[int, KeptRequest] = {}
        self._away: dict[int, float] = {}  # since when a gateway has no stream
        self._alone: dict[int, float] = {}  # since when a request that outlives its gateway has none

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    @property
    def wanted(self) -> bool:
        """Whether anything here keeps a node from going: all but ended answers that nobody has asked for."""
        return any(not (kept.ended and number in self._alone) for number, kept in self._kept.items())

    def open(self, request: GenerationRequest, gateway: int, keep: Keep | None = None) -> None:
        number, generated = request.handle, request.generated
        stay = self._journal.begin(request.origin, len(request.prompt_ids))
        if keep is None:
            self._kept[number] = KeptRequest(number, gateway, stay, len(generated))
        else:
            self._kept[number] = KeptRequest(
                number,
                gateway,
                stay,
                bare=len(generated),
                keep=keep,
                prompt_ids=request.prompt_ids,
                tokens=array("I", generated),
            )

    def close(self, number: int) -> None:
        """May be said again, and of what was never here."""
        kept = self._kept.pop(number, None)
        self._alone.pop(number, None)
        if kept is not None and not kept.ended:
            self._journal.ended(kept.stay, kept.drawn, LEFT)

    def halt(self, number: int) -> None:
        """It gets no more tokens: its gateway has found a stop string."""
        kept = self._kept[number]
        if not kept.ended:
            self._journal.ended(kept.stay, kept.drawn, "stop")
        kept.halted = True

    def add(self, event: TokenEvent) -> bool:
        """Whether its gateway is to be told now. What was cancelled is of nobody's interest."""
        kept = self._kept.get(event.handle)
        if kept is None or kept.halted:
            return False
        kept.add(event, self._journal)
        return kept.told

    def refuse(self, number: int, error: AfserveError) -> None:
        kept = self._kept[number]
        kept.refusal = error
        self._journal.ended(kept.stay, kept.drawn, f"refused: {type(error).__name__}", failed=True)

    # ---- gateways

    def is_of(self, number: int, gateway: int) -> bool:
        kept = self._kept.get(number)
        return kept is not None and kept.gateway == gateway

    def gateway_of(self, number: int) -> int:
        """Whose it is; of one that is not here, whose it was when it got its number."""
        kept = self._kept.get(number)
        return gateway_of(number) if kept is None else kept.gateway

    def of(self, gateway: int) -> list[int]:
        return [number for number, kept in self._kept.items() if kept.gateway == gateway]

    def held(self, gateway: int) -> tuple[Held, ...]:
        """What to say first on a new stream to this gateway."""
        mine = ((number, self._kept[number]) for number in self.of(gateway))
        return tuple(Held(number, kept.count, kept.keep is not None) for number, kept in mine)

    def left(self, gateway: int) -> None:
        """Its stream has ended. May be said again while it is away."""
        now = self._clock.now()
        self._away.setdefault(gateway, now)
        for number in self.of(gateway):
            kept = self._kept[number]
            kept.pause()
            if kept.keep is not None:
                self._alone.setdefault(number, now)

    def is_back(self, gateway: int) -> None:
        self._away.pop(gateway, None)

    def resume(self, number: int, start: int) -> TokenEvent | Refused | None:
        """What its gateway has missed; from now on it is told everything."""
        kept = self._kept.get(number)
        if kept is None or not kept.base <= start <= kept.count:
            return Refused(number, PeerError(f"token {start} of request {number} is not kept here"))
        missed = Refused(number, kept.refusal) if kept.refusal is not None else kept.since(start)
        kept.told = True
        self._alone.pop(number, None)
        return missed

    def orphans(self) -> list[int]:
        """Requests of gateways that have been away for longer than the grace, or than they wait; said once."""
        if not self._away and not self._alone:
            return []
        now = self._clock.now()
        gone = [gateway for gateway, since in self._away.items() if now - since >= self._grace]
        for gateway in gone:
            del self._away[gateway]
        waiting = [number for gateway in gone for number in self.of(gateway) if not self._outlives(number)]
        late = [number for number, since in self._alone.items() if now - since >= self._patience(number)]
        for number in late:
            del self._alone[number]
        return waiting + late

    def _outlives(self, number: int) -> bool:
        return self._kept[number].keep is not None

    def _patience(self, number: int) -> float:
        keep = self._kept[number].keep
        return self._grace if keep is None else max(self._grace, keep.seconds)

    # ---- requests that outlive their gateway

    def find(self, id: str) -> list[KeptAnswer]:
        """What is here of this request. What was refused may be computed elsewhere."""
        return [
            KeptAnswer(number, kept.prompt_ids, kept.count, kept.bare, kept.ended, kept.keep, kept.unheard)
            for number, kept in self._kept.items()
            if kept.keep is not None and kept.keep.id == id and kept.refusal is None
        ]

    def take(self, numbers: Iterable[int], gateway: int) -> dict[int, list[int]]:
        """They are this gateway's from now on, and wait for it. Returns what was whose until now."""
        before: dict[int, list[int]] = {}
        for number in numbers:
            kept = self._kept[number]
            if kept.gateway != gateway:
                before.setdefault(kept.gateway, []).append(number)
            kept.gateway = gateway
            kept.pause()
            self._alone[number] = self._clock.now()
        return before
