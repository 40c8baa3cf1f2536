"""What a pilot sees at one moment, and what happened between two: sums that gateways and nodes count in any case.

Values in, values out; where they come from is `live.py`'s to know, or a replay's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter

from afserve.control.pilot.sizes import Demand, PoolSizes
from afserve.control.wire.load_values import ClassCounts, grown


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Sums since the beginning, over all gateways, unless `Observed.since` made differences of them. Seconds.

    `first_*` are of first tokens, `rest_*` of the tokens behind them; late ones are those that missed their target.
    `*_busy` are summed over the nodes of a pool.
    """

    came: float = 0.0  # requests
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0  # 0 where nobody counts them
    found_tokens: float = 0.0  # of the prompts, in caches
    first: float = 0.0
    first_seconds: float = 0.0
    first_late: float = 0.0
    ended: float = 0.0
    answer_tokens: float = 0.0  # of those that ended
    rest_tokens: float = 0.0
    rest_seconds: float = 0.0
    rest_late: float = 0.0  # requests
    prefill_busy: float = 0.0
    decode_busy: float = 0.0
    experts_busy: float = 0.0
    decode_steps: float = 0.0  # of the nodes that decode


_REPRESENTATIVE = 4.0  # times those that run have to have ended, until their lengths are those of all
_sums = attrgetter(*(each.name for each in fields(PoolLoad)))


@dataclass(frozen=True, slots=True)
class Observed:
    """`at` in seconds of any clock. `sizes` are nodes that serve; `settled` says that nobody comes or goes. `classes`
    are sums of each class of service that ever came."""

    at: float
    sizes: PoolSizes
    load: PoolLoad
    settled: bool = True
    running: float = 0.0
    queued_tokens: float = 0.0
    classes: Mapping[str, ClassCounts] = field(default_factory=dict)

    def follows(self, before: "Observed") -> bool:
        """Whether no sum has become smaller: else somebody went with its part, and differences say nothing."""
        return all(new >= old for new, old in zip(_sums(self.load), _sums(before.load), strict=True))

    def since(self, before: "Observed") -> "SeenWindow":
        """Of moments that follow each other."""
        parts = (new - old for new, old in zip(_sums(self.load), _sums(before.load), strict=True))
        none = ClassCounts()
        classes = {name: grown(now, before.classes.get(name, none)) for name, now in self.classes.items()}
        return SeenWindow(max(self.at - before.at, 1e-9), self.sizes, PoolLoad(*parts), self.running, classes)


@dataclass(frozen=True, slots=True)
class SeenWindow:
    """What happened within `seconds`, on such pools."""

    seconds: float
    sizes: PoolSizes
    load: PoolLoad
    running: float = 0.0
    classes: Mapping[str, ClassCounts] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.load.came / self.seconds

    @property
    def ttft(self) -> float | None:
        """The mean; None where there was no first token."""
        return self.load.first_seconds / self.load.first if self.load.first else None

    @property
    def tpot(self) -> float | None:
        return self.load.rest_seconds / self.load.rest_tokens if self.load.rest_tokens else None

    @property
    def busy(self) -> tuple[float, float, float]:
        """Shares of the pools' time."""
        spent = (self.load.prefill_busy, self.load.decode_busy, self.load.experts_busy)
        first, rest, experts = (
            one / max(n, 1) / self.seconds for one, n in zip(spent, self.sizes, strict=True)
        )
        return first, rest, experts


@dataclass(slots=True)
class MeanLengths:
    """Means over requests that fade: `memory` requests weigh about as much as all before them.

    Of what came in the beginning short answers end first. While lengths are `young`, until several times as many have
    ended as are running, the answer is all tokens that were made, over all requests that ended: what lengths of a
    constant chance to end have as their likeliest mean, where some are not over yet.
    """

    memory: float = 2000.0
    prompt: float = 0.0
    computed: float = 0.0
    answer: float = 0.0
    square: float = 0.0
    _came: float = 0.0
    _ended: float = 0.0
    _made: float = 0.0  # tokens, while it is young
    _running: float = 0.0
    young: bool = True

    def note_window(self, window: SeenWindow) -> None:
        """As `note_load`, where it is known how many run."""
        load = window.load
        if not self.young or not (window.tpot or self._made):
            self.note_load(load)
            return
        self._note_prompts(load)
        self._ended += load.ended
        running, self._running = (self._running + window.running) / 2, window.running
        self._made += running * window.seconds / window.tpot if window.tpot else 0.0
        if self._ended:
            self.answer = max(self._made / self._ended, 1.0)
        self.young = self._ended < _REPRESENTATIVE * window.running

    def note_load(self, load: PoolLoad) -> None:
        self._note_prompts(load)
        if load.ended:
            self.answer = self._faded(self.answer, load.answer_tokens / load.ended, load.ended, self._ended)
            self._ended += load.ended

    def _note_prompts(self, load: PoolLoad) -> None:
        if not load.came:
            return
        came, before, mean = load.came, self._came, load.prompt_tokens / load.came
        computed = max(load.prompt_tokens - load.found_tokens, 0.02 * load.prompt_tokens)
        square = load.prompt_squares / came or 2 * mean * mean
        self.prompt = self._faded(self.prompt, mean, came, before)
        self.computed = self._faded(self.computed, computed / came, came, before)
        self.square = self._faded(self.square, square, came, before)
        self._came += came

    def _faded(self, known: float, newest: float, count: float, before: float) -> float:
        weight = count / (count + min(before, self.memory))
        return max(known + weight * (newest - known), 1.0)

    @property
    def known(self) -> bool:
        return self.prompt > 0 and self.answer > 0

    def demand(self, rate: float) -> Demand:
        spread = max(self.square / self.prompt**2 - 1, 0.0) if self.prompt else 1.0
        return Demand(rate, max(self.prompt, 1.0), max(self.answer, 1.0), max(self.computed, 1.0), spread)
