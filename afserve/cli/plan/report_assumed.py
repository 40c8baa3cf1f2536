"""What a plan's report says is assumed: every figure that the answer stands on, with where it is from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from afserve.placement.planner.cluster_file import on_cpu
from afserve.placement.planner.perf.curve import CurveSet
from afserve.placement.planner.perf.engine import Engine
from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware
from afserve.placement.planner.question import USEFUL, Question

NO_SOURCE = "its file names no source"


@dataclass(frozen=True, slots=True)
class Assumed:
    what: str
    value: str
    source: str


def assumed(question: Question, typed: Mapping[str, str]) -> list[Assumed]:
    """typed: how each flag that was given is spelled, by its parameter."""
    return [
        *_engines(question),
        *(row for pool in question.pools for row in _hardware(pool.chip, question.setting.precision.experts)),
        _kernels(question),
        *_requests(question, typed),
        *_routing(question, typed),
        *_goal(question, typed),
    ]


def _from(typed: Mapping[str, str], *flags: str) -> str:
    """ "typed, --tpot" or "default"."""
    given = [typed[flag] for flag in flags if flag in typed]
    return f"typed, {' '.join(given)}" if given else "default"


def _engines(question: Question) -> Iterator[Assumed]:
    for kind, engine in question.engines:
        if kind in question.kinds:
            name = "AFD" if kind == "afd" else kind
            yield Assumed(f"engine, {name}", f"{engine.name}: {engine.about}", _measured(engine))


def _measured(engine: Engine) -> str:
    rows, error = engine.fit.get("rows"), engine.fit.get("tpot_error_unseen_series")
    if not rows:
        return engine.source or "no measured rows"
    chips = sorted({like.chip for like in engine.rows.like})
    words = f"{rows} measured row{'s' * (rows != 1)} on {', '.join(chips)}"
    if isinstance(error, float):
        words += f", median error {error:.1%} on series not fitted"
    return f"{engine.source}; {words}" if engine.source else words


def _hardware(chip: Hardware, precision: str) -> Iterator[Assumed]:
    compute = f"{precision}_tflops" if precision in ("bf16", "fp8", "fp4") else "bf16_tflops"
    figures = (
        ("memory", f"{chip.memory / 1e9:g} GB", "memory_gb"),
        ("memory bandwidth", f"{chip.bandwidth / 1e12:g} TB/s", "memory_tb_s"),
        (f"peak for {precision} weights", f"{chip.flops(precision) / 1e12:g} TFLOP/s", compute),
        ("link inside a node", _link(chip), "link_gb_s"),
        ("network per device", f"{chip.network / 1e9:g} GB/s", "network_gb_s"),
        ("network latency", f"{chip.network_latency * 1e6:g} us", "network_latency_us"),
        *([("all-reduce over the network", _reduce(chip), "reduce_gb_s")] if chip.reduce else []),
        ("power", f"{chip.watts:g} W", "watts"),
        ("price", f"${chip.usd_per_hour:g} per device hour", "usd_per_hour"),
    )
    for what, value, key in figures:
        yield Assumed(f"{chip.name}: {what}", value, chip.sources.get(key, NO_SOURCE))


def _reduce(chip: Hardware) -> str:
    return f"{chip.reduce_latency * 1e6:g} us and {chip.reduce / 1e9:g} GB/s of the message"


def _link(chip: Hardware) -> str:
    return f"{chip.link / 1e9:g} GB/s" if chip.link > 0 else "none"


def _kernels(question: Question) -> Assumed:
    curves = question.setting.curves
    checked = f"checked on {', '.join(curves.checked)}" if curves.checked else "measured on one machine"
    value = f"{curves.name}: shares of the peaks that measured kernels reach"
    return Assumed("kernels", value, f"{checked}; spread {curves.model_spread:.0%}, twice that on other GPUs")


def _requests(question: Question, typed: Mapping[str, str]) -> Iterator[Assumed]:
    setting = question.setting
    work, precision = setting.workload, setting.precision
    lengths = ("context", "prompt", "answer", "trace")
    value = f"{work.name}; {work.context_mean:,.0f} tokens cached in a decode step"
    yield Assumed("requests", value, _from(typed, *lengths, "decode_only"))
    if setting.found.tiers:
        yield Assumed("prompt tokens whose KV is found", str(setting.found), _from(typed, "found"))
    if setting.concurrency:
        yield Assumed("requests in flight", f"{setting.concurrency:g}", _from(typed, "concurrency"))
    bits = f"{precision.experts} ({PRECISIONS[precision.experts]:g} bytes a weight)"
    yield Assumed("expert weights", bits, _from(typed, "precision"))
    yield Assumed("attention weights", precision.attention, _from(typed, "attention_precision", "precision"))
    yield Assumed("cache", precision.kv, _from(typed, "kv_precision"))
    drafts = [one for one in (setting.drafts, *question.draftable) if one.tokens]
    if drafts:
        yields = ", ".join(f"{one.length:.2f}" for one in drafts)
        numbers = ", ".join(str(one.tokens) for one in drafts)
        words = f"{drafts[0].drafter.name}: {yields} tokens a step with {numbers} drafted"
        whose = f"{_from(typed, 'draft', 'acceptance', 'domain')}; {drafts[0].source}"
        yield Assumed("speculation", words, whose)


def _routing(question: Question, typed: Mapping[str, str]) -> Iterator[Assumed]:
    routing = question.setting.routing
    if routing.counts:
        yield Assumed("expert popularity", "measured counts", _from(typed, "counts"))
    else:
        source = _from(typed, "skew") if "skew" in typed else "default: OLMoE on C4"
        yield Assumed("expert popularity", f"Zipf exponent {routing.zipf:g}", source)
    value = (
        f"{routing.redundant}; {routing.copies} cop{'y' if routing.copies == 1 else 'ies'} of every expert"
    )
    yield Assumed("spare expert slots", value, _from(typed, "redundant", "expert_copies"))


def _goal(question: Question, typed: Mapping[str, str]) -> Iterator[Assumed]:
    targets, endless = question.targets, float("inf")
    if targets.tpot < endless:
        whose = "99th percentile" if question.setting.percentile99 else "mean"
        yield Assumed("TPOT target", f"{targets.tpot * 1e3:g} ms, {whose}", _from(typed, "tpot", "p99"))
    elif question.floored:
        yield Assumed("TPOT target", f"{USEFUL * 1e3:g} ms, to be useful", "default where none is typed")
    if targets.ttft < endless:
        yield Assumed("TTFT target", f"{targets.ttft * 1e3:g} ms", _from(typed, "ttft"))
    if question.tokens_per_second:
        yield Assumed("rate", f"{question.tokens_per_second:,.0f} tok/s", _from(typed, "rate"))
    yield Assumed("objective", question.objective, _from(typed, "objective"))


def host_notes(question: Question) -> list[str]:
    """What is known of CPU hosts where nothing was calibrated."""
    curves, precision = question.setting.curves, question.setting.precision.experts
    hosts = [pool.chip for pool in question.pools if on_cpu(pool.chip.name) and curves.checked]
    if not hosts:
        return []
    isas = sorted({chip.isa for chip in hosts if chip.isa})
    known = any(curves.knows(isa) for isa in isas)
    return [
        *(f"experts with {isa} instructions: {_isa_source(curves, isa, precision)}" for isa in isas),
        f"{'the other ' if known else ''}curves of {curves.name} are of GPU kernels and say little about "
        f"{', '.join(chip.name for chip in hosts)}. Run `afserve bench calibrate --out mine.jsonl` there and plan with "
        "--engine mine.jsonl",
    ]


def _isa_source(curves: CurveSet, isa: str, precision: str) -> str:
    if curves.knows(isa):
        return curves.of_experts(isa, precision).source
    return f"no rows of {isa}, so GPU kernels' curves stand for them"
