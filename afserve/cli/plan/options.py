"""How the flags that describe a question become a `Question`."""

import re
from dataclasses import replace
from typing import Any

from afserve.cli.options import Within, gather_group
from afserve.cli.plan.catalog import load_curves, load_hardware, load_model, read_counts, read_lines
from afserve.cli.plan.drafting import draftable_of
from afserve.cli.plan.engines import engines_of, others_of
from afserve.cli.plan.flags import (
    GROUPS,
    GoalFlags,
    HardwareFlags,
    LayoutFlags,
    ModelFlags,
    RequestFlags,
    RoutingFlags,
)
from afserve.cli.plan.layout import (
    calibration_of,
    check_calibrated,
    layout_of,
    micro_batches_of,
    with_requests,
)
from afserve.cli.plan.slo import limits_of
from afserve.errors import ConfigError, shown
from afserve.placement.planner.perf.attention import PUBLISHED, Precision
from afserve.placement.planner.perf.drafting import NO_DRAFTS
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.found import Found, parse_found
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.trace_reader import read_trace
from afserve.placement.planner.perf.workload import Workload, fixed_context, from_lengths, parse_lengths
from afserve.placement.planner.question import KINDS, Question
from afserve.placement.planner.search import ANY, APART, HERE, DevicePool, GivenLayout, Targets

_COUNT, _PRICE = Within(1, 1 << 20, whole=True), Within(1e-6, 1e6)
_USUAL_SKEW = 0.4
LARGEST_INSTANCE = 512
"""Devices of one kind in one instance at most, where as many are to be had as it takes."""
_SHORTEST, _LONGEST = 1e-9, 1e6  # of a target, seconds
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1e-3}


def asked_question(flags: dict[str, Any]) -> Question:
    """Takes the flags of all groups out of what click read. Raises ConfigError or NotFoundError naming the flag."""
    groups: tuple[Any, ...] = tuple(gather_group(group, flags) for group in GROUPS)
    return build_question(*groups)


def seconds(text: str | None, option: str) -> float:
    """'50ms', '2s' or plain milliseconds; infinity for none."""
    if text is None:
        return float("inf")
    found = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s|)\s*", text)
    try:
        value = float(found.group(1)) * _SECONDS[found.group(2)] if found else 0.0
    except ValueError:
        value = 0.0
    if not _SHORTEST <= value <= _LONGEST:
        raise ConfigError(
            f"--{option}: {shown(text)} is not a time of {_SHORTEST:g} to {_LONGEST:g} s; write 50ms or 2s"
        )
    return value


def build_question(
    model: ModelFlags,
    hardware: HardwareFlags,
    layout: LayoutFlags,
    requests: RequestFlags,
    routing: RoutingFlags,
    goal: GoalFlags,
) -> Question:
    """Raises ConfigError or NotFoundError naming the flag."""
    if goal.objective == "count" and goal.rate <= 0:
        raise ConfigError("--objective count: the fewest devices for what rate? Add --rate", param="rate")
    if goal.objective == "latency" and goal.rate > 0:
        raise ConfigError(
            f"--objective latency is the TPOT of one request alone, and --rate {goal.rate:g} brings more: say with "
            "--tpot how fast they must be, and take another objective"
        )
    work = _workload(requests)
    if goal.rate > 0 and requests.trace is None and requests.answer is None:
        raise ConfigError("--rate: a request's answer length is not known; add --input and --output")
    shape, offered = load_model(model.model), _pools(hardware)
    goal = _with_slo(goal, shape)
    endless = next((pool.chip.name for pool in offered if pool.endless), None)
    if endless and goal.rate <= 0:
        raise ConfigError(
            f"--pool {endless}: without a count it is as many as a rate takes; add --rate, or write {endless}=COUNT"
        )
    widths = _widths(model, shape)
    if routing.counts and routing.skew is not None:
        raise ConfigError(
            f"--counts {routing.counts} and --skew {routing.skew:g} both say how uneven the routing is; keep one"
        )
    counts, counted = read_counts(routing.counts) if routing.counts else ((), 0)
    skew = _USUAL_SKEW if routing.skew is None else routing.skew
    own = calibration_of(layout, hardware.curves)
    curves, said = own or hardware.curves or "h200", "engine" if own else "curves"
    check_calibrated(said, curves, offered)
    draftable = draftable_of(model.draft, model.acceptance, model.domain, shape)
    setting = Setting(
        shape=shape,
        curves=load_curves(curves, shape, offered[0].chip, widths, said),
        workload=work,
        precision=widths,
        routing=Routing(skew, counts, routing.redundant, routing.expert_copies, counted),
        drafts=draftable[0] if len(draftable) == 1 else NO_DRAFTS,
        percentile99=goal.p99,
    )
    setting = with_requests(setting, layout, goal.ttft)
    setting = replace(setting, found=_found(requests, layout, work))
    setting = replace(setting, ttft=_ttft(goal.ttft, work))
    setting.routing.popularity(setting.shape.experts.experts)
    return Question(
        setting=setting,
        pools=offered,
        targets=Targets(seconds(goal.tpot, "tpot"), setting.ttft),
        objective="speed" if goal.objective == "latency" and setting.concurrency else goal.objective,
        micro_batches=micro_batches_of(goal.micro_batches),
        tokens_per_second=goal.rate * work.mean_answer,
        kinds=KINDS if layout.kind is None else (layout.kind,),
        layout=layout_of(layout, offered),
        engines=engines_of(layout, offered, curves, setting),
        others=others_of(layout, offered, curves, setting),
        prompts=_readers(requests.prompts, setting, layout_of(layout, offered)),
        draftable=draftable if len(draftable) > 1 else (),
    )


def _widths(model: ModelFlags, shape: ModelShape) -> Precision:
    """As asked, else as the checkpoint was published. Raises ConfigError for what no plan counts."""
    if model.expert_memory is not None:
        raise ConfigError(
            f"--expert-memory {model.expert_memory}: plans count every expert in the memory of its device: what one "
            "costs that lies in the host or on disk hangs on how often traffic finds its experts near, and was "
            "measured on no GPU. Drop it, and try it: `afserve up --expert-memory` and /metrics say how many were near",
            param="expert_memory",
        )
    attention, experts = (model.precision, model.precision) if model.precision else PUBLISHED[shape.stored]
    return Precision(model.attention_precision or attention, experts, model.kv_precision)


def _with_slo(goal: GoalFlags, shape: ModelShape) -> GoalFlags:
    if goal.slo is None:
        return goal
    if goal.tpot or goal.ttft:
        raise ConfigError(f"--slo {goal.slo} has a TTFT and a TPOT; drop --tpot and --ttft, or --slo")
    ttft, tpot = limits_of(goal.slo, shape)
    return replace(goal, ttft=ttft, tpot=tpot, p99=True)


def _readers(asked: str | None, setting: Setting, layout: GivenLayout) -> tuple[str, ...]:
    if setting.workload.decode_only and asked is not None:
        raise ConfigError("--prompts: a decode-only workload has no prompts; give --input and --output")
    if setting.concurrency and asked in ("apart", "either"):
        raise ConfigError(
            f"--prompts {asked}: with --concurrency prompts are read elsewhere by --decode-only and --prefill-devices"
        )
    if asked is None:
        fixed = setting.workload.decode_only or setting.concurrency or layout != ANY
        asked = "here" if fixed else "either"
    return {"here": (HERE,), "apart": (APART,), "either": (HERE, APART)}[asked]


def _found(requests: RequestFlags, layout: LayoutFlags, work: Workload) -> Found:
    found = parse_found(requests.found)
    if found.tiers and (work.decode_only or layout.concurrency):
        why = "--concurrency" if layout.concurrency else "a decode-only workload"
        raise ConfigError(
            f"--found: with {why} no prompts are planned; give --input and --output, or --trace, without --concurrency"
        )
    return found


def _pools(hardware: HardwareFlags) -> tuple[DevicePool, ...]:
    offered = tuple(_pool(text, hardware.network, hardware.link) for text in hardware.pools)
    names = [pool.chip.name for pool in offered]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"--pool {twice}: given twice; add the counts, or give a copy of its file another name"
        )
    return offered


def _ttft(text: str | None, work: Workload) -> float:
    if text is not None and work.decode_only:
        raise ConfigError("--ttft: a decode-only workload has no prompts; give --input and --output")
    return seconds(text, "ttft")


def _workload(requests: RequestFlags) -> Workload:
    context, prompt, answer, trace = requests.context, requests.prompt, requests.answer, requests.trace
    given = [
        name
        for name, value in (("--context", context), ("--input", prompt), ("--trace", trace))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both say how long requests are; keep one")
    if trace is not None:
        return read_trace(str(trace), read_lines(trace, "trace"), requests.decode_only)
    if prompt is not None or answer is not None:
        if prompt is None or answer is None:
            raise ConfigError(
                "--input and --output go together", param="input" if prompt is None else "output"
            )
        return from_lengths(
            parse_lengths(prompt, "input"), parse_lengths(answer, "output"), decode_only=requests.decode_only
        )
    return fixed_context(4096 if context is None else context)


def _pool(text: str, network: float | None, link: float | None) -> DevicePool:
    found = re.fullmatch(r"([^=@]+)(?:=([^@]+))?(?:@(.+))?", text)
    if not found:
        raise ConfigError(
            f"--pool {shown(text)}: write NAME=COUNT or NAME=COUNT@USD, such as h800=64@2.0, or NAME with --rate"
        )
    name, count, price = found.groups()
    devices = LARGEST_INSTANCE if count is None else _COUNT.read_number(count)
    usd = None if price is None else _PRICE.read_number(price)
    if not isinstance(devices, int) or not _COUNT.range.holds(devices):
        raise ConfigError(f"--pool {shown(text)}: the count must be {_COUNT.range}, not {shown(count)}")
    if price is not None and not _PRICE.range.holds(usd):
        raise ConfigError(
            f"--pool {shown(text)}: USD per device hour must be {_PRICE.range}, not {shown(price)}"
        )
    chip = load_hardware(name.strip()).priced(usd)
    if network is not None:
        typed = chip.sources_with("network_gb_s", "--network")  # what was measured is of another network
        chip = replace(chip, network=network * 1e9, reduce=0.0, reduce_latency=0.0, sources=typed)
    if link is not None:
        chip = replace(chip, link=link * 1e9, sources=chip.sources_with("link_gb_s", "--link"))
    return DevicePool(chip, devices, endless=count is None)
