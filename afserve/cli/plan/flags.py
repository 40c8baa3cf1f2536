"""The flags of `afserve plan`; those that describe the question are of `afserve simulate` and `afserve fleet` too.

They travel in groups, one per thing that the question names: model, hardware, layout, requests, routing, goal. It
imports no planner, so that `--help` needs none.
"""

from dataclasses import dataclass
from pathlib import Path

import click

from afserve.cli.options import Within, declare_options, option, output_file
from afserve.cli.plan.slo import NAMES
from afserve.config import THREADS

LONGEST = 100_000_000  # tokens of a request
PRECISIONS = ("bf16", "fp8", "fp4", "int4")
DOMAINS = ("coding", "other")
_DEVICES = Within(1, 1 << 20, whole=True)


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Which model, and in how many bits."""

    model: str = option(
        "--model", "-m", required=True, help="A known model, a config.json or its folder, a GGUF file."
    )
    precision: str | None = option(
        type=click.Choice(PRECISIONS),
        help="Weights.  [default: as the checkpoint was published where configs/models says it, else fp8]",
    )
    attention_precision: str | None = option(
        type=click.Choice(PRECISIONS), help="Attention weights, if different."
    )
    kv_precision: str = option(
        default="bf16", type=click.Choice(("bf16", "fp8")), help="Cache.  [default: bf16]"
    )
    expert_memory: str | None = option(
        metavar="SIZE",
        help="Refused: every expert is planned in its device's memory. What the others cost with `afserve up "
        "--expert-memory` hangs on how often traffic finds its experts near.",
    )
    draft: str = option(
        default="off",
        metavar="METHOD[:N]",
        help="Tokens that are drafted and verified in a step: mtp:3, eagle3:N, dflash:N, dspark:N, ngram:N, "
        "suffix:N, model:FOLDER:N; mtp: as many as pay in each plan; auto: the model's MTP layer, else eagle3, and as "
        "many as pay.  [default: off]",
    )
    acceptance: str | None = option(
        metavar="P|L1,L2,...",
        help="Of drafts: the chance that a token is accepted when those before it were, or mean accepted lengths with "
        "1, 2, ... drafted tokens.  [default: as published for the model, or for others]",
    )
    domain: str | None = option(
        type=click.Choice(DOMAINS),
        help="Of the text, for --draft: published acceptance is of coding prompts.  [default: other]",
    )


@dataclass(frozen=True, slots=True)
class HardwareFlags:
    """What is on offer, and how fast it was measured to be."""

    pools: tuple[str, ...] = option(
        "--pool",
        multiple=True,
        required=True,
        metavar="NAME[=COUNT][@USD]",
        help="Hardware on offer, with a price per device hour if not the listed one; without a count as many as --rate "
        "takes. Repeatable.",
    )
    network: float | None = option(
        type=Within(1e-3, 1e5), help="GB/s per device between nodes, for all pools."
    )
    link: float | None = option(type=Within(1e-3, 1e5), help="GB/s per device inside a node, for all pools.")
    curves: str | None = option(
        help="Fitted curves: a name, a .toml, or a .jsonl that afserve bench measured.  [default: h200]"
    )


@dataclass(frozen=True, slots=True)
class LayoutFlags:
    """Which engine, and what of the layout is given instead of sought."""

    engines: tuple[str, ...] = option(
        "--engine",
        multiple=True,
        metavar="NAME|FILE",
        help="Whose measured speed to plan with: vllm, sglang, tensorrt-llm, deepseek, fastafd, step-3, megascale, "
        "afserve, a profile, or a .jsonl of `afserve bench calibrate`. Twice: one per kind.  [default: those whose "
        "measured rows are most like the question]",
    )
    kind: str | None = option(
        type=click.Choice(("afd", "colocated")), help="Only plans of this kind.  [default: both]"
    )
    attention_devices: int | None = option(type=_DEVICES, help="AFD: so many attention devices.")
    expert_devices: int | None = option(type=_DEVICES, help="AFD: so many expert devices.")
    devices: int | None = option(type=_DEVICES, help="Colocated: so many devices.")
    tensor_parallel: int | None = option(
        type=Within(1, 64, whole=True), help="Attention over so many devices."
    )
    expert_slices: bool = option(
        default=False,
        is_flag=True,
        help="A slice of every expert per device, not whole experts: AFD's expert side, and colocated under one "
        "tensor-parallel rank, which may then span hosts of one device.",
    )
    concurrency: float | None = option(
        type=Within(1, 1e7), help="Requests that clients keep in flight.  [default: as many as fit]"
    )
    max_running: int | None = option(type=_DEVICES, help="Requests the engine may decode at once.")
    prefill_devices: int | None = option(
        type=_DEVICES, help="With --decode-only and --concurrency: devices of one prefill instance."
    )
    prefill_workers: float | None = option(
        type=Within(1e-3, 1e4), help="Prefill instances per decode instance.  [default: 1]"
    )


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """How long requests are."""

    context: float | None = option(type=Within(1, LONGEST), help="Cached tokens per request; decode only.")
    prompt: str | None = option("--input", help="Prompt tokens: a number or 'lognormal MEAN DEVIATION'.")
    answer: str | None = option("--output", help="Answer tokens, likewise.")
    trace: Path | None = option(type=Path, help="Requests of a Mooncake JSON-lines or Azure CSV trace.")
    decode_only: bool = option(default=False, is_flag=True, help="Prompts are prefilled elsewhere.")
    prompts: str | None = option(
        type=click.Choice(("here", "apart", "either")),
        help="Read by what decodes, or by devices of their own from any pool, which with AFD share the experts.  "
        "[default: either; here with --concurrency or a given layout]",
    )
    found: tuple[str, ...] = option(
        multiple=True,
        metavar="TIER=SHARE[@GB/s]",
        help="Share of the prompt tokens whose KV is found in memory, or at a peer, in host memory or on disk at so "
        "many GB/s for each attention rank, such as host=0.3@20. Repeatable.",
    )


@dataclass(frozen=True, slots=True)
class RoutingFlags:
    """How unevenly experts are chosen, and what stands against it."""

    skew: float | None = option(
        type=Within(0, 4), help="Zipf exponent of expert popularity (OLMoE on C4: 0.4).  [default: 0.4]"
    )
    counts: Path | None = option(type=Path, help="Measured routing counts; not beside --skew.")
    redundant: int = option(
        default=0, type=Within(0, 1 << 16, whole=True), help="Spare expert slots for replicas of hot experts."
    )
    expert_copies: int = option(
        default=1,
        type=Within(1, 64, whole=True),
        help="Devices that hold every expert at least.  [default: 1]",
    )


@dataclass(frozen=True, slots=True)
class GoalFlags:
    """What a plan must reach, what it is judged by, and what is tried."""

    tpot: str | None = option(help="Time per output token at most, such as 50ms.")
    ttft: str | None = option(help="Time to first token at most, such as 2s. Needs --input.")
    p99: bool = option(
        "--p99/--mean", default=False, help="Whether --tpot is for the 99th percentile. Default: the mean."
    )
    slo: str | None = option(
        type=click.Choice(NAMES), help="TTFT and TPOT at the 99th percentile as a benchmark asks for them."
    )
    objective: str = option(
        default="dollar",
        type=click.Choice(("dollar", "device", "watt", "latency", "count")),
        help="Tokens per dollar, device or watt, lowest TPOT (with --concurrency: most tokens for those requests), "
        "or fewest devices for --rate.  [default: dollar]",
    )
    rate: float = option(default=0.0, type=Within(0, 1e9), help="Requests per second to sustain.")
    micro_batches: str = option(default="1,2,3,4", help="Counts to try.  [default: 1,2,3,4]")


GROUPS = (ModelFlags, HardwareFlags, LayoutFlags, RequestFlags, RoutingFlags, GoalFlags)
question_flags = declare_options(*GROUPS)


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """What is answered beside the plan, and where it is written."""

    top: int = option(
        default=3, type=Within(1, 50, whole=True), help="Plans to show beside the baseline.  [default: 3]"
    )
    as_json: bool = option("--json", is_flag=True, help="Print JSON: best, alternatives, verdict.")
    charts: tuple[Path, ...] = option(
        "--chart",
        multiple=True,
        type=output_file,
        metavar="FILE",
        help="Pareto chart: .png, .html. Repeatable.",
    )
    reports: tuple[Path, ...] = option(
        "--report",
        multiple=True,
        type=output_file,
        metavar="FILE",
        help="Write a report to decide from: .html (one page, no network), .json, .png. It has the question, the "
        "verdict and what would decide it, the Pareto front, the stages, a tornado, what is assumed with its source. "
        "Repeatable.",
    )
    cluster: Path | None = option(
        type=output_file,
        metavar="FILE",
        help="Write the best plan that `afserve up --cluster FILE` can start; with --goodput, the best layout.",
    )
    goodput: bool = option(
        is_flag=True,
        help="Also simulate which pays: shared experts, P/D with two copies, or chunked prefill. Takes minutes; needs "
        "--trace, --ttft, --tpot and one --pool.",
    )
    cores: int | None = option(
        type=Within(THREADS.low, THREADS.high, whole=True),
        help="AFD: all nodes are processes of one machine with so many cores, played event by event. Needs a "
        "calibration as --engine, --attention-devices, --expert-devices, --concurrency and a decode-only workload.",
    )
