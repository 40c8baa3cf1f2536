"""`afserve plan --goodput`: which of four ways to serve prompts and decoding pays, by simulation on the trace.

The length of pieces is the engine's. Stage times are the kernels', without an engine's measured rows, and the same for
all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from afserve.cli.plan.flags import LayoutFlags
from afserve.config import EngineSettings
from afserve.engine.pieces import OVERHEAD, PIECE_SECONDS
from afserve.errors import ConfigError
from afserve.placement.planner.cluster_file import Phases, on_cpu
from afserve.placement.planner.perf.drafting import NO_DRAFTS, Drafts
from afserve.placement.planner.question import Question
from afserve.placement.planner.simulate.phase_stages import Pieces, pieces_on_gpu
from afserve.placement.planner.simulate.phases import GoodputTargets
from afserve.placement.planner.simulate.search_phases import (
    HOSTED,
    KINDS,
    MIXED,
    SHARED,
    TWO_COPIES,
    BestLayout,
    PhasePool,
    PlayedLoad,
    described,
    search,
    split_of,
)
from afserve.placement.planner.simulate.station import SimulatedRequest

REQUESTS = 1000  # of the trace that are played, the first ones
_MOST_RUNNING = 1 << 16  # requests that a node decodes at once
_CLEAR = 0.1  # goodputs that differ by less are as good as equal


@dataclass(frozen=True, slots=True)
class PlannedGoodput:
    """Requests per second inside both targets, of the best layout of a kind; none where the model does not fit."""

    kind: str
    found: BestLayout | None

    @property
    def rate(self) -> float:
        return self.found.rate if self.found else 0.0


@dataclass(frozen=True, slots=True)
class PlayedGoodputs:
    """Of each kind of layout, most first; plain: the same without drafts, where there are any."""

    found: tuple[PlannedGoodput, ...] = ()
    drafts: Drafts = NO_DRAFTS
    plain: tuple[PlannedGoodput, ...] = ()

    def drafts_pay(self) -> list[str]:
        """In a line, where both were played."""
        if not self.plain:
            return []
        best, plain = self.found[0], self.plain[0]
        if not best.rate or not plain.rate:
            which = "With" if best.rate else "Without" if plain.rate else "Neither with nor without"
            return [f"{which} drafts requests are served inside the targets."]
        gain = best.rate / plain.rate
        words = "are as good as none" if abs(gain - 1) < _CLEAR else "pay" if gain > 1 else "do not pay"
        return [
            f"Drafts {words}: {gain:.2f} times the {plain.rate:.2f} requests/s without them ({plain.kind})."
        ]


def check_goodput(question: Question, flags: Mapping[str, object]) -> None:
    """Raises ConfigError naming what the simulation lacks or would not play. `flags`: as they were typed."""
    setting = question.setting
    if given := [field.name for field in fields(LayoutFlags) if flags.get(field.name)]:
        flag = "--engine" if given[0] == "engines" else f"--{given[0].replace('_', '-')}"
        raise ConfigError(
            f"--goodput: every layout is tried, with the times of kernels; leave out {flag}", param=given[0]
        )
    if not setting.workload.arrival.size or setting.workload.decode_only:
        raise ConfigError(
            "--goodput: arrivals are played from a trace; add --trace FILE, without --decode-only",
            param="trace",
        )
    if not np.isfinite((question.targets.tpot, question.targets.ttft)).all():
        raise ConfigError("--goodput: requests are counted that meet both targets; add --ttft and --tpot")
    if len(question.pools) > 1:
        names = ", ".join(pool.chip.name for pool in question.pools)
        raise ConfigError(
            f"--goodput: one kind of device is compared, not {names}; keep one --pool", param="pool"
        )
    if setting.found.tiers:
        raise ConfigError("--goodput: every prompt is computed; leave out --found", param="found")


def goodputs(question: Question) -> tuple[PlannedGoodput, ...]:
    """Of each kind of layout, on all devices of the pool, most first."""
    work, offered = question.setting.workload, question.pools[0]
    together = zip(work.arrival[:REQUESTS], work.prompt[:REQUESTS], work.answer[:REQUESTS], strict=True)
    asked = [SimulatedRequest(float(at), int(prompt), int(answer)) for at, prompt, answer in together]
    load = PlayedLoad(asked, GoodputTargets(question.targets.ttft, question.targets.tpot))
    floor, setting = EngineSettings().prompt_share, question.setting
    if on_cpu(offered.chip.name):
        pieces = Pieces(PIECE_SECONDS, OVERHEAD, floor)
    else:
        pieces = pieces_on_gpu(offered.chip, setting.shape.expert_row, setting.precision.experts, floor)
    pool = PhasePool.from_question(
        replace(question.setting, concurrency=0.0, prefill=None), offered.chip, offered.count
    )
    found = [
        PlannedGoodput(kind, next(iter(search(kind, pool, load, pieces).values()), None)) for kind in KINDS
    ]
    return tuple(sorted(found, key=lambda one: -one.rate))


def goodput_with(question: Question, drafts: Drafts) -> PlayedGoodputs:
    """With those drafts, and without beside them."""
    plain = goodputs(question.with_drafts(NO_DRAFTS)) if drafts.tokens else ()
    return PlayedGoodputs(goodputs(question.with_drafts(drafts)), drafts, plain)


def played_lines(played: PlayedGoodputs) -> str:
    """A line for each, best first, and which pays; nothing where nothing was played."""
    found = played.found
    if not found:
        return ""
    lines = [
        "\n",
        f"goodput of the first {REQUESTS} requests of the trace, simulated, 90 % inside both targets"
        f"{f', {played.drafts}' if played.plain else ''}:",
    ]
    for one in found:
        words = described(one.found.layout) if one.found else "does not fit"
        lines.append(f"  {one.rate:8.2f} requests/s  {one.kind}: {words}")
    how = how_to_start(found[0]) if found[0].rate else ""
    return "\n".join([*lines, which_pays(found), *played.drafts_pay(), how]).rstrip()


def phases_of(one: PlannedGoodput, question: Question) -> Phases | None:
    """The nodes that `afserve up` starts for this layout; None where it starts no such layout."""
    if one.found is None or not one.rate or one.kind != SHARED:
        return None
    split, decodes = split_of(one.found.layout), one.found.layout.decodes[0]
    if split.degrees != (1, 1):
        return None
    work, nodes = question.setting.workload, question.pools[0].count - split.experts - split.reads
    running = int(decodes.kv_tokens / nodes / (work.mean_prompt + work.mean_answer))
    batch = max(split.micro_batches, min(running, _MOST_RUNNING))
    return Phases(split.reads, nodes, split.experts, batch, split.micro_batches, split.chunk, split.floor)


def how_to_start(best: PlannedGoodput) -> str:
    """What of the best layout `afserve up` starts, and what --cluster writes."""
    ways = {
        SHARED: "Start it with `afserve up --prefill P --decode D --experts N`, where a rank is one device",
        HOSTED: "Start it with `afserve up --prefill P --decode D --experts N` where N is P + D; on GPUs nothing lets "
        "decoding go first on a device that both share, as was simulated",
        TWO_COPIES: "`afserve up` does not start it: it hands no KV from one copy of the experts to another",
        MIXED: "Instances of one device are `afserve up --colocated`; it starts no larger ones",
    }
    return (
        f"{ways[best.kind]}. --cluster writes the layout of {SHARED} where its ranks are of one device, else the plan "
        "above."
    )


def which_pays(found: tuple[PlannedGoodput, ...]) -> str:
    best, next_ = found[0], found[1]
    if not best.rate:
        return "None of the four meets both targets for 90 % of the requests at any rate."
    if next_.rate > best.rate * (1 - _CLEAR):
        return f"{best.kind} and {next_.kind} are as good as equal; the simulation does not tell which pays."
    if not next_.rate:
        return f"Only {best.kind} serves this inside the targets."
    return f"{best.kind} pays: {best.rate / next_.rate:.2f} times {next_.kind}."


def played_values(played: PlayedGoodputs) -> dict[str, object]:
    """The `goodput` of --json, where any was played."""
    if not played.found:
        return {}
    values = {"requests": REQUESTS, "layouts": _layouts(played.found), "verdict": which_pays(played.found)}
    if played.plain:
        values |= {"drafts": str(played.drafts), "without_drafts": _layouts(played.plain)}
    return {"goodput": values}


def _layouts(found: tuple[PlannedGoodput, ...]) -> list[dict[str, object]]:
    return [
        {
            "kind": one.kind,
            "requests_per_s": round(one.rate, 3),
            "layout": described(one.found.layout) if one.found else None,
        }
        for one in found
    ]
