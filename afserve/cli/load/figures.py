"""From what was heard to figures: counts, rates, percentiles, goodput. Values only; times in milliseconds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from afserve.cli.load.heard import COMPLETED, FAILED, REFUSED, Heard
from afserve.cli.load.loops import Ran
from afserve.errors import ConfigError

SHARES = (50, 90, 95, 99)
METRICS = ("ttft", "itl", "tpot", "e2e")  # as SLOs name them


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles, mean and largest; None where nothing was measured."""

    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Of one run. Counts are of requests; `sent` = completed + refused + failed. Rates are per second.

    `good` are completed requests within every limit of the SLO, None without one. Client: `cpu_seconds` of this
    process, that per token and as a share of one core, the p99 of how late requests went out, and of its timers.
    """

    sent: int
    completed: int
    refused: int
    failed: int
    reasons: Mapping[str, int]
    finished: Mapping[str, int]
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    good: int | None
    goodput_per_s: float | None
    slo_ms: Mapping[str, float]
    client: Mapping[str, float]

    def row(self) -> dict[str, object]:
        """For JSON, with numbers rounded to what they can say."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def figures(ran: Ran, slo: Mapping[str, float] | None = None) -> LoadFigures:
    """`slo`: milliseconds that each metric may take; a request's inter-token time is its largest gap."""
    done = [one for one in ran.heard if one.outcome == COMPLETED]
    outcomes = Counter(one.outcome for one in ran.heard)
    tokens = sum(one.tokens for one in done)
    good = sum(_holds(one, slo) for one in done) if slo else None
    return LoadFigures(
        sent=len(ran.heard),
        completed=len(done),
        refused=outcomes[REFUSED],
        failed=outcomes[FAILED],
        reasons=dict(Counter(one.why for one in ran.heard if one.why).most_common(8)),
        finished=dict(Counter(str(one.finish_reason) for one in done)),
        seconds=ran.seconds,
        prompt_tokens=sum(one.prompt_tokens for one in done),
        completion_tokens=tokens,
        requests_per_s=len(done) / ran.seconds if ran.seconds else 0.0,
        tokens_per_s=tokens / ran.seconds if ran.seconds else 0.0,
        ttft_ms=spread(one.ttft * 1e3 for one in done),
        itl_ms=spread(gap * 1e3 for one in done for gap in one.gaps),
        tpot_ms=spread(one.tpot * 1e3 for one in done if one.tpot is not None),
        e2e_ms=spread(one.e2e * 1e3 for one in done),
        good=good,
        goodput_per_s=None if good is None or not ran.seconds else good / ran.seconds,
        slo_ms=dict(slo or {}),
        client={
            "cpu_seconds": ran.cpu,
            "cpu_us_per_token": ran.cpu * 1e6 / tokens if tokens else 0.0,
            "core_share": ran.cpu / ran.seconds if ran.seconds else 0.0,
            "late_ms_p99": spread((one.sent - one.due) * 1e3 for one in ran.heard).p99 or 0.0,
            "lag_ms_p99": spread(lag * 1e3 for lag in ran.lags).p99 or 0.0,
        },
    )


def spread(values: Iterable[float]) -> Spread:
    found = sorted(values)
    if not found:
        return Spread()
    shares = {f"p{share}": percentile(found, share) for share in SHARES}
    return Spread(**shares, mean=sum(found) / len(found), max=found[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as numpy has it."""
    at = (len(ordered) - 1) * share / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def read_slo(text: str) -> dict[str, float]:
    """`ttft=500ms,tpot=50ms,e2e=10s` in milliseconds. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        number, scale = (value[:-2], 1.0) if value.endswith("ms") else (value.removesuffix("s"), 1e3)
        try:
            limit = float(number) * scale
        except ValueError:
            limit = -1.0
        if name not in METRICS or not 0 < limit < float("inf"):
            raise ConfigError(
                f"--slo: {part!r} is not one of {', '.join(METRICS)} with a time, such as ttft=500ms"
            )
        found[name] = limit
    return found


def _holds(one: Heard, slo: Mapping[str, float]) -> bool:
    took = {"ttft": one.ttft, "itl": max(one.gaps, default=0.0), "tpot": one.tpot or 0.0, "e2e": one.e2e}
    return all(took[name] * 1e3 <= limit for name, limit in slo.items())


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value
