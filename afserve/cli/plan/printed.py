"""A planner's answer for people: a table, and lines about it. `values.py` has it for programs."""

from collections.abc import Sequence

from afserve.cli.plan.aligned import aligned
from afserve.cli.plan.report_assumed import host_notes
from afserve.cli.plan.tables import table_notes
from afserve.placement.planner.bound_one import alone_words
from afserve.placement.planner.perf.engine import PLAIN
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.prefill import BUSY
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import USEFUL, Question, RankedPlans

_HEAD = (
    "", "plan", "prompts", "attention", "experts", "tp", "m", "draft", "batch", "TPOT ms", "TTFT ms", "tok/s",
    "tok/s/dev", "$/Mtok", "limit", "bound by",
)  # fmt: skip
_TTFT, _DRAFT, _PROMPTS = (_HEAD.index(name) for name in ("TTFT ms", "draft", "prompts"))


def as_table(
    question: Question,
    found: RankedPlans,
    verdict: str,
    changes: dict[str, float | None],
    top: int,
    drafted: Sequence[str] = (),
) -> str:
    """Best plan, runners-up, colocated baseline, sensitivity, verdict and what there is to say of drafts as text."""
    shown = _chosen(found, top)
    rows = [_HEAD, *(_row(label, plan) for label, plan in shown)]
    if question.setting.workload.decode_only:
        rows = [row[:_TTFT] + row[_TTFT + 1 :] for row in rows]
    if not any(plan.drafts.tokens for _, plan in shown):
        rows = [row[:_DRAFT] + row[_DRAFT + 1 :] for row in rows]
    if all(plan.prefill is None for _, plan in shown):
        rows = [row[:_PROMPTS] + row[_PROMPTS + 1 :] for row in rows]
    words = rows[0].index("tp")
    lines = [_heading(question), "", *aligned(rows, left=range(words))]
    best = shown[0][1]
    counted = "speed of each request" if _for_speed(question) else "throughput inside the targets"
    lines += [
        "",
        *_details(question, best),
        *(f"note: {note}" for note in beyond_of(question, best)),
        "",
        f"+10 % of each, {counted}: {_sensitivity(changes)}",
        "",
        verdict,
        *(["", *drafted] if drafted else []),
    ]
    return "\n".join(lines)


def _heading(question: Question) -> str:
    shape, setting = question.setting.shape, question.setting
    pools = ", ".join(f"{pool} at ${pool.chip.usd_per_hour:g}/h" for pool in question.pools)
    lines = [
        f"{shape.name}: {_size(shape.total_elems)} weights, {_size(shape.active_elems)} active; "
        f"{setting.workload.name}; {_target(question)}",
        f"{pools}; {_assumed(question)}",
        f"engines: {_served_by(question)}",
    ]
    lines += [f"note: {note}" for note in notes_of(question)]
    return "\n".join(lines)


def _served_by(question: Question) -> str:
    """Whose speed the plans have, and how well it is known."""
    words = []
    for kind, engine in question.engines:
        if kind in question.kinds:
            rows = engine.fit.get("rows")
            known = f" ({rows} measured row{'s' * (rows != 1)})" if rows else ""
            words.append(f"{kind.upper() if kind == 'afd' else kind} as {engine.name}{known}")
    return ", ".join(words) or "bare kernels"


def notes_of(question: Question) -> list[str]:
    """What a reader of the figures should know about the hardware that was asked for."""
    precision, found = question.setting.precision.experts, []
    narrow = [pool.chip.name for pool in question.pools if _wider(pool.chip, precision)]
    if narrow:
        found.append(
            f"{', '.join(narrow)} without {precision} units: weights are stored in {precision} and multiplied in a "
            "wider type"
        )
    found += host_notes(question)
    curves = question.setting.curves
    counted, layers = question.setting.routing.counted_layers, question.setting.shape.experts.layers
    if counted and counted != layers:
        found.append(
            f"--counts has {counted} layer{'s' * (counted != 1)} and {question.setting.shape.name} has {layers} with "
            "experts: all are taken to be as uneven as the mean of those"
        )
    name = question.setting.shape.name
    if curves.models and name not in curves.models:
        found.append(
            f"{curves.name} was measured with {', '.join(curves.models)}: where {name} is another model, calibrate "
            "with it"
        )
    if question.machine is not None:
        found.append(
            f"AFD's nodes are processes of one machine, played over {question.machine.cores} cores. Stage times, and "
            "what 10 % more would bring, are those of nodes that share nothing"
        )
    elif curves.name.endswith(".jsonl") and "afd" in question.kinds:
        found.append(
            "AFD plans give every node a host of its own: nodes that share the cores of one machine wait for each "
            "other, which --cores N plays for a typed layout"
        )
    return found + table_notes(question.setting.shape) + _not_run(question)


def _not_run(question: Question) -> list[str]:
    """What was typed of the layout and no engine that is planned with runs."""
    found = []
    for kind, engine in question.engines:
        if kind not in question.kinds:
            continue
        parallel, asked = question.layout.tensor_parallel, question.micro_batches
        if parallel and parallel not in engine.parallel:
            found.append(
                f"{engine.name} runs a tensor parallelism of {_counts(engine.parallel)}, not {parallel}"
            )
        if not set(asked) & set(engine.micro_batches):
            found.append(
                f"{engine.name} runs {_counts(engine.micro_batches)} micro-batches, not {_counts(asked)}"
            )
    return [f"{words}: its plans below are what such an engine would do" for words in found]


def _counts(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))


def beyond_of(question: Question, best: Plan) -> list[str]:
    """That nothing is fast enough to be useful; and sizes that a calibration, and so its interval, says nothing of."""
    found = []
    if question.floored and best.tpot > USEFUL * (1 + 1e-9):
        found.append(
            f"no plan makes a token in {USEFUL * 1e3:g} ms, as fast as people read: this is the best of those that are "
            "too slow. Offer faster hardware or links, or say with --tpot what is wanted"
        )
    requests, context = question.setting.curves.most
    asked = question.setting.workload.context_mean
    if best.batch > requests or asked > 1.5 * context:
        found.append(
            f"{question.setting.curves.name} has steps of at most {requests:,.0f} requests and {context:,.0f} tokens "
            f"of context; the best plan has {best.batch:,} and {asked:,.0f}. Beyond what was measured it is a guess, "
            "and the interval does not know that: calibrate without --quick, or plan with --max-running"
        )
    return found


def _target(question: Question) -> str:
    tpot, ttft = question.targets.tpot, question.targets.ttft
    words = (
        [f"TPOT {'p99 ' if question.setting.percentile99 else ''}<= {tpot * 1e3:g} ms"]
        if tpot < _NONE
        else []
    )
    words += [f"TTFT <= {ttft * 1e3:g} ms"] if ttft < _NONE else []
    words += [f"at least {question.tokens_per_second:,.0f} tok/s"] if question.tokens_per_second else []
    if question.floored:
        words.append(f"no TPOT target: at most {USEFUL * 1e3:g} ms, to be useful")
    return ", ".join(words) or "no targets"


_NONE = float("inf")


def _assumed(question: Question) -> str:
    """Precision and routing: what the answer hangs on beside the hardware."""
    precision, routing = question.setting.precision, question.setting.routing
    words = [precision.weights(question.setting.shape.stored), f"cache {precision.kv}"]
    layers = f" of {routing.counted_layers} layer{'s' * (routing.counted_layers != 1)}"
    words.append(f"measured expert counts{layers}" if routing.counts else f"expert skew {routing.zipf:g}")
    if any(engine.own and engine.name != PLAIN.name for _, engine in question.engines):
        words.append("memory as `afserve up` keeps it")
    words += [f"{routing.redundant} spare expert slots"] if routing.redundant else []
    words += [f"{routing.copies} copies of every expert"] if routing.copies > 1 else []
    return ", ".join(words)


def _wider(chip: Hardware, precision: str) -> bool:
    """Whether this chip has no units for that precision. int4 weights are multiplied in bf16 everywhere."""
    has = {"fp8": chip.flops_fp8, "fp4": chip.flops_fp4}
    return precision in has and has[precision] <= 0


def _for_speed(question: Question) -> bool:
    return question.objective == "latency" and not question.tokens_per_second


def _size(elems: int) -> str:
    return f"{elems / 1e9:.0f}B" if elems >= 1e9 else f"{elems / 1e6:.0f}M"


def _chosen(found: RankedPlans, top: int) -> list[tuple[str, Plan]]:
    """The best, distinct runners-up, and the best of the kind that is not among them."""
    shown: list[tuple[str, Plan]] = []
    for plan in found.plans:
        if len(shown) < top:
            shown.append(("best" if not shown else "next", plan))
    for kind in ("colocated", "afd"):
        first = found.best(kind)
        if first is not None and all(plan.kind != kind for _, plan in shown):
            shown.append(("baseline" if kind == "colocated" else "best AFD", first))
    return shown


def _row(label: str, plan: Plan) -> tuple[str, ...]:
    afd = plan.kind == "afd"
    return (
        label,
        plan.kind.upper() if afd else plan.kind,
        f"{plan.prefill.devices} {plan.prefill.hardware}" if plan.prefill else "with attention",
        _decoding(plan),
        f"{plan.experts.devices} {plan.experts.hardware}" if afd else "same",
        str(plan.attention.tensor_parallel),
        str(plan.micro_batches),
        str(plan.drafts),
        str(plan.batch),
        f"{plan.tpot * 1e3:.1f}",
        f"{plan.ttft * 1e3:,.0f}",
        f"{plan.tok_s:,.0f}",
        f"{plan.tok_s_per_device:,.0f}",
        f"{plan.usd_per_mtok:.3f}",
        plan.limited_by,
        f"{plan.busiest} {plan.bound_by}",
    )


def _decoding(plan: Plan) -> str:
    each = plan.attention.devices // plan.decoders
    return f"{f'{plan.decoders} x ' if plan.decoders > 1 else ''}{each} {plan.attention.hardware}"


def _details(question: Question, best: Plan) -> list[str]:
    idle = best.bubbles()
    lines = [
        f"Best plan, +-{best.error:.0%} (one sigma, 80 % inside {best.interval[0] * 1e3:.1f} to "
        f"{best.interval[1] * 1e3:.1f} ms): {best.requests:,} request{'s' * (best.requests != 1)} in decode, "
        f"${best.usd_per_hour:,.2f}/h, {best.watts / 1e3:,.1f} kW"
    ]
    if best.outside:
        lines.append(
            f"Outside of what was measured: {'; '.join(best.outside)}. The interval is that wide for it"
        )
    times = best.stages
    lines.append(
        f"one layer of one micro-batch: attention {times.attention * 1e6:.0f} us, dispatch {times.dispatch * 1e6:.0f}, "
        f"experts {times.experts * 1e6:.0f}, combine {times.combine * 1e6:.0f}"
        + (
            f"; idle: attention {idle['attention']:.0%}, experts {idle['experts']:.0%}"
            if best.kind == "afd"
            else ""
        )
    )
    alone = alone_words(question, best)
    lines += [alone] if alone else []
    if not best.decode_only:
        taken = (
            f"prompts take {best.prefill_share:.0%} of the time"
            if best.prefill is None
            else f"prompts are read by {best.prefill.devices} {best.prefill.hardware}, at most {BUSY:.0%} busy"
        )
        lines.append(f"{taken}; TTFT is a mean, see `afserve simulate` for p99")
        lines += _shared(question, best)
        lines += _found(question, best)
    copies = instances_of(question, best)
    if question.tokens_per_second:
        lines.append(rate_words(question, best))
    elif copies > 1:
        lines.append(f"The pools hold {copies} such instances: {copies * best.tok_s:,.0f} tok/s together")
    left = idle_words(question, best)
    lines += [f"Idle: {left} of the pools"] if left else []
    return lines


def _shared(question: Question, best: Plan) -> list[str]:
    """Over how many devices a prompt is split, and why."""
    if best.prompt_parts == 1:
        return []
    target = question.setting.ttft
    return [
        f"{best.prompt_parts} of them read each prompt together, chunk by chunk in turns: with one the first token "
        f"would take {best.prompt_alone * 1e3:,.0f} ms. `afserve up` does so with --ttft {target:g}"
    ]


def _found(question: Question, best: Plan) -> list[str]:
    """What of prompts is not computed, and whether bringing it is sooner."""
    setting = question.setting_of(best)
    if not setting.found.tiers:
        return []
    brought, computed = setting.fetching, setting.found.found_share * setting.workload.mean_prompt
    from afserve.placement.planner.simulate.losses import again_second

    computing = computed * again_second(question, best)
    return [
        f"KV found: {setting.found}; it comes in {brought * 1e3:,.1f} ms a prompt, computing it would take "
        f"{computing * 1e3:,.1f} ms of {'an attention rank' if best.kind == 'afd' else 'a rank'}"
        + ("" if brought <= computing else ": compute it instead")
    ]


def rate_words(question: Question, best: Plan) -> str:
    """How many devices the rate takes, and what they cost."""
    taken = " and ".join(f"{best.instances * count:,} {name}" for name, count in best.devices_used.items())
    each = f"{best.instances:,} such instances, " if best.instances > 1 else ""
    share = question.tokens_per_second / best.instances / best.tok_s
    return (
        f"For {question.tokens_per_second:,.0f} tok/s it takes {each}{taken}: "
        f"${best.instances * best.usd_per_hour:,.2f}/h, {best.instances * best.watts / 1e3:,.1f} kW, {share:.0%} of "
        "what they could do"
    )


def instances_of(question: Question, best: Plan) -> int:
    """How many such plans the pools hold, or a rate takes."""
    used = best.devices_used
    if question.tokens_per_second:
        return best.instances
    return min(
        (pool.count // used[pool.chip.name] for pool in question.pools if pool.chip.name in used), default=1
    )


def idle_words(question: Question, best: Plan) -> str:
    """Devices on offer that no instance takes; "" where all are busy."""
    copies, used = instances_of(question, best), best.devices_used
    left = {
        pool.chip.name: pool.count - copies * used.get(pool.chip.name, 0)
        for pool in question.pools
        if not pool.endless
    }
    return ", ".join(f"{count:,} {name}" for name, count in left.items() if count)


def _sensitivity(changes: dict[str, float | None]) -> str:
    said = {
        name: "no batch fits" if change is None else f"{round(change, 3) + 0.0:+.1%}"
        for name, change in changes.items()
    }
    return ", ".join(f"{name} {words}" for name, words in said.items())
