"""Why no deployment meets the targets: which constraint fails, by how much, and the nearest plan that works.

Called only when a search found nothing, for all kinds of deployment or for one.
"""

from dataclasses import replace

import numpy as np

from afserve.placement.planner.perf.hardware import PRECISIONS
from afserve.placement.planner.perf.kv import cache_bytes
from afserve.placement.planner.perf.prefill import MOST_PARTS, reader
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.search import ANY, APART, DevicePool, Targets, families

_GIB = 2.0**30
_MOST = 13  # 4,096 devices: a model that does not fit there has a cache that no device holds


def explain(question: Question) -> str:
    """A message for the user: copies and memory first, then latency, then rate."""
    copies = question.setting.routing.copies
    if all(pool.count < copies for pool in question.pools):
        return (
            f"{copies} copies of every expert take {copies} devices of one kind, and {_pools(question)} is offered: "
            "offer more devices or lower --expert-copies"
        )
    if not _anything_fits(question):
        sought = replace(question, layout=replace(ANY, running=question.layout.running))
        if question.layout != sought.layout and _anything_fits(sought):
            return _layout_words(question)
        return _memory_words(question)
    free = replace(question, targets=Targets(), tokens_per_second=0.0)
    fastest = answer(replace(free, objective="latency")).best()
    if fastest is None:
        return _prompt_words(question)
    if fastest.tpot > question.targets.tpot:
        return (
            f"no deployment of {_pools(question)} reaches a TPOT of {question.targets.tpot * 1e3:g} ms: the fastest is "
            f"{fastest.tpot * 1e3:.1f} ms ({fastest.tpot / question.targets.tpot - 1:+.0%}), {describe(fastest)}. "
            f"Raise --tpot to {np.ceil(fastest.tpot * 1e3 * 1.05):.0f}ms or offer faster hardware"
        )
    if fastest.ttft > question.targets.ttft:
        return (
            f"no deployment of {_pools(question)} reaches a TTFT of {question.targets.ttft * 1e3:g} ms: the least is "
            f"about {fastest.ttft * 1e3:.0f} ms, {describe(fastest)}. {_split_words(question)}"
            "Raise --ttft or shorten --input"
        )
    return _rate_words(question)


def _prompt_words(question: Question) -> str:
    work = question.setting.workload
    return (
        f"on {_pools(question)} prompts of {work.mean_prompt:,.0f} tokens take more than 95 % of the time beside "
        f"answers of {work.mean_answer:,.0f}, even one request at a time: nearly every step would wait for a prompt. "
        "Plan decoding alone with --decode-only (prompts are prefilled elsewhere) or offer faster hardware"
    )


def _split_words(question: Question) -> str:
    """What it would bring to read each prompt on several devices, where some only read prompts; a sentence."""
    setting, found = question.setting_for("afd"), []
    for pool in question.pools if "afd" in question.kinds and APART in question.prompts else ():
        for experts in question.pools:
            one = reader(setting, pool.chip, experts.chip, np.array([float(experts.count)]))
            if one is not None:
                found += [
                    (float(shared.latency[0]) + one.moved / pool.chip.network, shared, pool.chip)
                    for shared in (one.among(parts, pool.chip.network) for parts in range(1, MOST_PARTS + 1))
                    if shared.parts < pool.count
                ]
    if not found:
        return ""
    least, shared, chip = min(found, key=lambda each: each[0])
    wide = f"{shared.moved / 1e9:,.3g} GB of keys and values over {chip.network / 1e9:,.3g} GB/s"
    if shared.parts == 1:
        return f"A prompt on several {chip.name} is not read sooner: that moves {wide}. "
    return f"{shared.parts} {chip.name} together would have a prompt read in {least * 1e3:,.0f} ms, with {wide}. "


def _rate_words(question: Question) -> str:
    most = answer(replace(question, objective="latency", tokens_per_second=0.0))
    plans = answer(replace(question, objective="device", tokens_per_second=0.0)).plans
    if not plans:
        both = [plan for plan in most.plans if plan.tpot <= question.targets.tpot]
        nearest = f"; nearest: {describe(both[0])}" if both else ""
        return f"no deployment of {_pools(question)} meets TPOT and TTFT together{nearest}. Relax one of them"

    def most_of(plan: Plan) -> int:
        used = plan.devices_used
        return min(pool.count // used[pool.chip.name] for pool in question.pools if pool.chip.name in used)

    best = max(plans, key=lambda plan: plan.tok_s * most_of(plan))
    held, wanted = most_of(best), int(np.ceil(question.tokens_per_second / best.tok_s))
    takes = " and ".join(f"{wanted * count:,} {name}" for name, count in best.devices_used.items())
    several = f"{held:,} instances of " if held > 1 else ""
    return (
        f"{_pools(question)} sustain at most about {held * best.tok_s:,.0f} tok/s inside the targets, with {several}"
        f"{describe(best)}; {question.tokens_per_second:,.0f} are asked for, which would take about {takes}. Offer so "
        "many (--pool NAME without a count is as many as it takes) or lower --rate"
    )


def why_none(question: Question, kind: str) -> str:
    """What keeps every deployment of one kind (colocated, afd) out, where the other kind has one: a clause."""
    name = {"afd": "AFD", "colocated": "colocated"}[kind]
    one = replace(question, kinds=(kind,))
    if not any(
        len(f.ranks) for f in families(list(question.pools), question.micro_batches, (kind,), question.layout)
    ):
        given = _typed(question)
        if given:
            return f"{_pools(question)} make no {name} deployment with {given}"
        return f"an {name} deployment takes two devices at least, and {_pools(question)} is offered"
    if not _anything_fits(one):
        free = replace(one, layout=replace(ANY, running=question.layout.running))
        given = f" with {_typed(question)}" if _typed(question) and _anything_fits(free) else ""
        return f"no {name} deployment fits the memory of {_pools(question)}{given}"
    if answer(replace(one, targets=Targets(), tokens_per_second=0.0)).best() is None:
        return f"prompts would take more than 95 % of the time of every {name} deployment"
    return f"no {name} deployment meets the targets{' at that rate' * bool(question.tokens_per_second)}"


def describe(plan: Plan) -> str:
    """One plan in a few words."""
    each = f", {plan.prompt_parts} on each" if plan.prompt_parts > 1 else ""
    reading = f"{plan.prefill.devices} {plan.prefill.hardware} for prompts{each}" if plan.prefill else ""
    if plan.kind == "colocated":
        several = f"{plan.decoders} times " if plan.decoders > 1 else ""
        words = f"colocated on {several}{plan.attention.devices // plan.decoders} {plan.attention.hardware}"
        return f"{words} and {reading}" if reading else words
    return (
        f"AFD with {reading + ', ' if reading else ''}{plan.attention.devices} {plan.attention.hardware} for attention "
        f"and {plan.experts.devices} {plan.experts.hardware} for experts"
    )


def _anything_fits(question: Question) -> bool:
    tried = families(list(question.pools), question.micro_batches, question.kinds, question.layout)
    return any(
        (family.batch_limit(question.setting_for(family.kind)) >= 1).any()
        for family in tried
        if len(family.ranks)
    )


def _memory_words(question: Question) -> str:
    shape, precision = question.setting.held, question.setting.precision
    copies, spare = question.setting.routing.copies, question.setting.routing.redundant
    slots = question.setting.routing.slots(shape.experts.experts) / max(shape.experts.experts, 1)
    experts = shape.expert_elems * PRECISIONS[precision.experts] * slots
    kept = precision.experts if copies == 1 else f"{precision.experts}, {copies} copies"
    kept += f", --redundant {spare}" if spare else ""
    attention = shape.attention_elems * PRECISIONS[precision.attention]
    cache = cache_bytes(shape, precision, question.setting.workload.context_mean)
    usable = max(question.setting_for(kind).engine.memory for kind in question.kinds)
    whole = sum(pool.count * pool.chip.memory for pool in question.pools)
    parallel = question.layout.tensor_parallel
    each = (
        f", {attention / parallel / _GIB:,.1f} GiB on each device of a rank of {parallel}"
        if parallel > 1
        else ""
    )
    return (
        f"{shape.name} does not fit {_pools(question)}: expert weights {experts / _GIB:,.0f} GiB "
        f"({kept}), attention weights {attention / _GIB:,.0f} GiB per rank ({precision.attention}{each}) and "
        f"{cache / _GIB:.2f} GiB of cache per request against {whole * usable / _GIB:,.0f} GiB usable, {usable:.0%} of "
        f"{whole / _GIB:,.0f} (`memory_gb` of the hardware's file). "
        f"{_enough(question)}"
    )


def _layout_words(question: Question) -> str:
    shape, precision = question.setting.held, question.setting.precision
    experts = shape.expert_elems * PRECISIONS[precision.experts] * question.setting.routing.copies
    attention = shape.attention_elems * PRECISIONS[precision.attention]
    return (
        f"{shape.name} does not fit {_pools(question)} with {_typed(question)}: experts have {experts / _GIB:,.0f} GiB "
        f"({precision.experts}), each attention rank {attention / _GIB:,.0f} GiB ({precision.attention}) and its "
        "cache, and devices must fill whole ranks. Without these flags it fits: give more devices or drop them"
    )


def _typed(question: Question) -> str:
    """The flags that give a part of the layout, as they are typed."""
    names = ("attention_devices", "expert_devices", "devices", "tensor_parallel")
    layout = question.layout
    typed = [f"--{name.replace('_', '-')} {getattr(layout, name)}" for name in names if getattr(layout, name)]
    return " ".join(typed + ["--expert-slices"] * layout.slices)


def _enough(question: Question) -> str:
    """The least count of the roomiest device that holds everything, found by asking the search."""
    chip = max((pool.chip for pool in question.pools), key=lambda found: found.memory)
    free = replace(ANY, running=question.layout.running, slices=question.layout.slices)

    def fits(count: int) -> bool:
        return _anything_fits(replace(question, pools=(DevicePool(chip, count),), layout=free))

    high = next((1 << power for power in range(1, _MOST) if fits(1 << power)), 0)
    if not high:
        return (
            f"Not even one request fits on any number of {chip.name}: shorten the context or narrow the cache"
        )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    spare = ", fewer spare slots (--redundant)" if question.setting.routing.redundant else ""
    return f"It takes at least {high} {chip.name}; offer more devices{spare} or a narrower precision"


def _pools(question: Question) -> str:
    return " + ".join(map(str, question.pools))
