"""The options of `afserve bench serve`: how requests go out, what they ask, and what is written of it."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from afserve.cli.bench.decode import numbers
from afserve.cli.load.arrivals import ARRIVALS, POISSON, TracedRequest
from afserve.cli.load.asks import CHAT, COMPLETIONS, Ask, RequestForm
from afserve.cli.options import Within, existing_file, option, output_file
from afserve.errors import ConfigError


def rates(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...]:
    """A click callback: numbers above 0, comma-separated."""
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (0.0,)
    if not all(0 < rate <= 1e6 for rate in found):
        raise click.BadParameter(f"{text!r} is not a list of numbers above 0 such as 0.5,2", ctx, option)
    return found


def counts(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    return numbers(ctx, option, text) if text else ()


def fields(ctx: click.Context, option: click.Parameter, text: str | None) -> Mapping[str, object]:
    """A click callback: a JSON object."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object", ctx, option)
    return found


@dataclass(frozen=True, slots=True)
class Loop:
    """Closed with `concurrency`, open with `rate` or `trace`; one turn for each of them."""

    concurrency: tuple[int, ...] = option(
        callback=counts, metavar="N[,N]", help="Closed loop: streams that are open at once. [default: 8]"
    )
    rate: tuple[float, ...] = option(
        callback=rates, metavar="R[,R]", help="Open loop: requests per second in the mean."
    )
    arrivals: str = option(
        type=click.Choice(ARRIVALS), default=POISSON, show_default=True, help="With --rate: how they come."
    )
    burst: int = option(
        type=click.IntRange(2, 100_000), default=8, show_default=True, help="Requests of one of the bursts."
    )
    trace: Path | None = option(
        type=existing_file,
        help="Open loop: arrivals and lengths of a trace (Mooncake's JSON lines, Azure's CSV); --rate scales it.",
    )
    requests: int | None = option(
        type=click.IntRange(1), help="Requests of each turn. [default: 64 without --duration; all of a trace]"
    )
    duration: float | None = option(
        type=Within(0.01, 1e6), metavar="SECONDS", help="No new request after so long; open ones end."
    )
    warm_up: int = option(
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Requests before each turn that do not count.",
    )

    def check(self) -> None:
        """Raises ConfigError where options do not go together."""
        if self.concurrency and (self.rate or self.trace):
            raise ConfigError(
                "--concurrency: is for the closed loop, --rate and --trace for the open one; drop one"
            )
        if self.arrivals != POISSON and (not self.rate or self.trace):
            raise ConfigError("--arrivals: needs --rate, and no --trace, which has its own")

    def turns(self) -> list["Loop"]:
        """Each with one concurrency, rate or trace, and an end."""
        open_ended = self.duration is None and self.trace is None and self.requests is None
        bounded = replace(self, requests=64) if open_ended else self
        if self.rate:
            return [replace(bounded, rate=(rate,)) for rate in self.rate]
        if self.trace is not None:
            return [bounded]
        return [replace(bounded, concurrency=(streams,)) for streams in self.concurrency or (8,)]

    @property
    def rate_of(self) -> float | None:
        return self.rate[0] if self.rate else None

    @property
    def kind(self) -> str:
        if self.trace is not None:
            return "trace"
        return self.arrivals if self.rate else "closed"

    @property
    def name(self) -> str:
        """Of one turn, for people."""
        if self.kind == "closed":
            return f"{self.concurrency[0]} stream{'s' * (self.concurrency[0] > 1)}"
        rate = f" {self.rate[0]:g}/s" if self.rate else ""
        return f"{self.kind}{rate}"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What each request asks. Lengths in tokens; with a trace its own, these being the most."""

    model: str | None = option(help="What the server calls it; the first that it lists if not given.")
    endpoint: str = option(
        type=click.Choice((CHAT, COMPLETIONS)), default=COMPLETIONS, show_default=True, help="Which API."
    )
    input_len: int = option(
        type=click.IntRange(1), default=64, show_default=True, help="Length of generated prompts, in words."
    )
    vocabulary: int = option(
        type=click.IntRange(2),
        metavar="V",
        help="Generated prompts are exactly --input-len random token ids below V, for servers that take ids.",
    )
    output_len: int = option(
        type=click.IntRange(1), default=64, show_default=True, help="Tokens that each request asks for."
    )
    prompts: Path | None = option(
        type=existing_file, help='JSON lines with "prompt" or "messages", used again and again.'
    )
    ends_early: bool = option(
        "--ends-early", is_flag=True, help="Answers may end before --output-len (no ignore_eos is sent)."
    )
    extra: Mapping[str, object] = option(
        callback=fields,
        metavar="JSON",
        help="Further fields of every request, such as '{\"temperature\": 1}'.",
    )
    seed: int = option(type=click.IntRange(0), default=0, show_default=True, help="Of prompts and arrivals.")
    timeout: float = option(
        type=Within(0.01, 86_400), default=600.0, show_default=True, help="Seconds that one request may take."
    )

    def form(self, model: str) -> RequestForm:
        """Raises ConfigError."""
        if self.vocabulary and (self.endpoint != COMPLETIONS or self.prompts):
            raise ConfigError("--vocabulary: token ids are for --endpoint completions, without --prompts")
        return RequestForm(self.endpoint, model, self.vocabulary or 0, not self.ends_early, self.extra)

    def traced(self, form: RequestForm, trace: Sequence[TracedRequest], seed: int) -> Iterator[Ask]:
        draw = random.Random(seed)
        for one in trace:
            yield form.made(min(one.input, self.input_len), min(one.output, self.output_len), draw)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is written. `slo` as `figures.read_slo` reads it."""

    slo: str = option(
        default="",
        metavar="METRIC=TIME[,..]",
        help="Limits of a good request: ttft, itl (its largest gap), tpot, e2e; such as ttft=500ms,tpot=50ms.",
    )
    as_json: bool = option("--json", is_flag=True, help="One JSON row per turn.")
    out: Path | None = option(type=output_file, help="Append the JSON rows to this file.")
    requests_out: Path | None = option(
        type=output_file,
        help="Append a JSON line for each request to this file.",
    )
    plot: Path | None = option(type=output_file, help="Draw the times into this file.")
