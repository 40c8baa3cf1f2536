"""How wide a plan's interval is: from rows that were measured of its engine, from the spreads of its curves, and at
least as wide as rows were off where nothing like it was measured. Values only.
"""

import math

from afserve.placement.pipeline import StageTimes
from afserve.placement.planner.perf.engine_rows import ClosestRow, Like
from afserve.placement.planner.perf.prefill import decoding_only
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.search import PlanFamily

WITHIN_80 = 1.2816
"""Standard deviations that hold 80 % of a normal distribution, to either side."""
DRAFTING = 0.1
"""One standard deviation of what drafting takes in an engine that was measured without; an assumption."""
OTHER_MAKER, WIDE_RANK = math.log(3.0), math.log(2.2)
"""Least half width, of log TPOT, where no engine was measured on chips of that maker, or with a tensor-parallel rank
over hosts: published rows of the first kind were 1.8 to 3.6 times what was planned, of the second twice."""
ROWS_MAKER = "nvidia"


def layout_like(family: PlanFamily, setting: Setting) -> Like:
    """What measured rows are compared with, for the one layout of `family`."""
    if family.kind == "afd":
        return setting.like(family.attention, "afd")
    return setting.like(family.attention, setting.colocated(float(family.ranks[0])))


def decoding_setting(family: PlanFamily, setting: Setting) -> Setting:
    return setting if family.prefill is None else decoding_only(setting)


def closest_row(family: PlanFamily, setting: Setting, batch: float) -> ClosestRow | None:
    return setting.engine.rows.closest(layout_like(family, setting), *size_of(family, batch))


def size_of(family: PlanFamily, batch: float) -> tuple[float, float]:
    """(requests in decode, devices that decode) of the one layout of `family`."""
    requests = float(family.ranks[0] * batch * family.micro_batches)
    return requests, float(family.ranks[0] * family.tensor_parallel + family.expert_devices[0])


def half_width(family: PlanFamily, setting: Setting, times: StageTimes, core: float, batch: float) -> float:
    """From rows that were measured of the engine; where there are none, from the spreads of its curves. Drafts add
    what is not known of their acceptance, and of an engine that nobody measured with drafts."""
    drafted = setting.drafts.tokens > 0 and not setting.engine.rows.drafted
    more = WITHIN_80 * math.hypot(setting.drafts.deviation, DRAFTING * drafted)
    least = math.hypot(*(width for _, width in outside_of(family, setting)))
    return math.hypot(max(_own_width(family, setting, times, core, batch), least), more)


def outside_of(family: PlanFamily, setting: Setting) -> tuple[tuple[str, float], ...]:
    """(what no row of any engine has, the least half width that it asks for)."""
    chips = {family.attention.name: family.attention, family.experts.name: family.experts}
    measured = {like.chip for like in setting.engine.rows.like}
    found = [
        (f"no engine was measured on chips of {chip.maker}", OTHER_MAKER)
        for chip in chips.values()
        if chip.maker not in (ROWS_MAKER, "cpu") and chip.rows_name not in measured
    ]
    if family.tensor_parallel > 1 and not family.attention.on_fast_link(family.tensor_parallel):
        found.append(
            (
                f"none was measured with a tensor-parallel rank of {family.tensor_parallel} over hosts",
                WIDE_RANK,
            )
        )
    return tuple(dict.fromkeys(found))


def _own_width(family: PlanFamily, setting: Setting, times: StageTimes, core: float, batch: float) -> float:
    if not setting.engine.measured:
        return WITHIN_80 * _error(family, setting, times, core)
    return setting.engine.half_width(layout_like(family, setting), *size_of(family, batch))


def _step_seconds(setting: Setting) -> float:
    """Seconds of a step that belong to no layer; none where the next step is prepared meanwhile."""
    return 0.0 if setting.steps_ahead else setting.curves.pick("step", setting.precision.attention).launch


def _error(family: PlanFamily, setting: Setting, times: StageTimes, core: float) -> float:
    """The curves' spreads weighted by their share of a layer, and the model's own from validation."""
    curves, precision = setting.curves, setting.precision
    kind, layer = setting.shape.attention[0].kind, curves.pick("attention_layer", precision.attention)
    total = times.attention + times.experts
    parts = (
        (core, curves.pick("core", precision.kv, kind).spread),
        (times.attention - core, curves.pick("gemm", precision.attention).spread),
        (times.experts, curves.of_experts(family.experts.isa, precision.experts).spread),
        (layer.launch, layer.spread),
        (_step_seconds(setting) / setting.shape.layers, curves.pick("step", precision.attention).spread),
    )
    own = sum((seconds / total * spread) ** 2 for seconds, spread in parts if total > 0)
    model = max(curves.spread_on(family.attention.rows_name), curves.spread_on(family.experts.rows_name))
    return float((own + model**2) ** 0.5)
