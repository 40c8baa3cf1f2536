"""Whether a new request can be given its tokens in time: predicted before it goes to any node.

What counts is the whole way to a first token. Prompt tokens whose first token came, per second in which some were
waited for, are what the system does, whichever of its pools is the narrow one; prompts that wait, divided by that, are
when a new one would have its turn: what is asked for must leave room for the error of that. A prediction alone refuses
nobody: somebody must have waited for a third of it already. Numbers in, a refusal out; it knows no nodes.
"""

from collections import Counter
from dataclasses import dataclass

from afserve.control.requests import Requests
from afserve.engine.scheduling.request import NO_TENANT, Tenant
from afserve.errors import OverloadedError

WINDOW_SECONDS = 0.5  # of a measurement at least
_WEIGHT = 0.3  # of the newest measurement in the mean: what answers take changes within seconds
_FULL = 0.5  # of a limit: in overload the queue stays there, and what is taken would be late half of the time at 1
_SEEN = 0.3  # of a limit that somebody must have waited for
_LEAST_RETRY = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request asks for, in seconds: its first token after `ttft` at most, `tpot` from one token to the next on
    average, all of it within `deadline`. None is without one. `tenant` is whose request it is, and
    `cache_salt` says whose cached blocks it may use."""

    ttft: float | None = None
    tpot: float | None = None
    deadline: float | None = None
    tenant: Tenant = NO_TENANT
    cache_salt: str = ""

    def __bool__(self) -> bool:
        return (self.ttft, self.tpot, self.deadline) != (None, None, None)


class Admission:
    """Over the requests of one gateway, whose share of the system is what it measures. `refused` counts by reason.
    `prompt_rate` is in prompt tokens per second, `tpot` in seconds; 0 where it was not measured yet."""

    def __init__(self, requests: Requests) -> None:
        self.refused: Counter[str] = Counter()
        self.prompt_rate = self.tpot = 0.0
        self._requests = requests
        self._sampled: float | None = None
        self._reading: tuple[float, int] | None = None  # since when somebody waits, and what was read by then
        self._said: tuple[float, int, int] | None = None  # when, tokens so far, requests that ran

    def sample(self, now: float) -> None:
        """Several times a second while requests are open, and before each that is to be admitted."""
        if self._sampled is not None and now - self._sampled < WINDOW_SECONDS:
            return
        self._sampled = now
        self._sample_prompts(now)
        self._sample_tokens(now)

    def _sample_prompts(self, now: float) -> None:
        """A prompt may take longer than a window: then the window is longer too."""
        read, began = self._requests.read_tokens, self._reading
        if not self._requests.unread:
            self._reading = None
        elif began is None:
            self._reading = now, read
        elif read > began[1]:
            rate = (read - began[1]) / (now - began[0])
            self.prompt_rate += (_WEIGHT if self.prompt_rate else 1.0) * (rate - self.prompt_rate)
            self._reading = now, read

    def _sample_tokens(self, now: float) -> None:
        requests = self._requests
        if not requests.running:
            self._said, self.tpot = None, 0.0
            return
        if self._said is not None:
            since, before, ran = self._said
            if tokens := requests.generated_tokens - before:
                self.tpot = (now - since) * (ran + requests.running) / 2 / tokens
        self._said = now, requests.generated_tokens, requests.running

    def check(self, tokens: int, wanted: Objectives, now: float) -> None:
        """`tokens` of its prompts are to be computed. Raises OverloadedError where it would be too late."""
        self.sample(now)
        limits = [("ttft", wanted.ttft), ("deadline", wanted.deadline)]
        given = [(limit, name) for name, limit in limits if limit is not None]
        if given:
            self._check_first(tokens, wanted.tenant, *min(given), now)
        if wanted.tpot is not None and self.tpot > wanted.tpot and self._requests.running:
            self._refuse(
                "tpot",
                f"a token takes {1e3 * self.tpot:.3g} ms at the present load, asked for were "
                f"{1e3 * wanted.tpot:.3g} ms",
                _LEAST_RETRY,
            )

    def _check_first(self, tokens: int, tenant: Tenant, limit: float, name: str, now: float) -> None:
        if not self.prompt_rate or self._requests.waited(now) < _SEEN * limit:
            return
        before = self._requests.before(tenant, tokens)
        seconds = (before + tokens) / self.prompt_rate
        if seconds > _FULL * limit:
            self._refuse(
                name,
                f"the first token would come after about {seconds:.1f} s, behind {before:,} tokens of other prompts; "
                f"asked for were {limit:g} s, of which {_FULL:.0%} may be predicted",
                seconds - _FULL * limit,
            )

    def _refuse(self, name: str, why: str, retry_after: float) -> None:
        self.refused[name] += 1
        raise OverloadedError(
            f"{name}: {why}. Try again later, or with a larger {name}",
            retry_after=max(_LEAST_RETRY, retry_after),
        )
