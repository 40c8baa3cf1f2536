"""A planner's answer for programs: the JSON of `afserve plan --json`."""

from afserve.cli.plan.heard import heard_values
from afserve.cli.plan.printed import beyond_of, notes_of
from afserve.placement.planner.panel import Panel
from afserve.placement.planner.perf.engine import Engine
from afserve.placement.planner.plan import Plan, Side
from afserve.placement.planner.question import Question, RankedPlans


def as_values(
    question: Question, found: RankedPlans, panel: Panel, verdict: str, changes: dict[str, float | None]
) -> dict[str, object]:
    """The JSON of --json. Times in ms, rates in tokens per second, money in USD."""
    plans = [_values(plan) for plan in found.plans]
    return {
        "model": question.setting.shape.name,
        "objective": question.objective,
        "best": plans[0],
        "alternatives": plans[1:],
        "sensitivity_10_percent": {
            name: None if change is None else round(change, 4) + 0.0 for name, change in changes.items()
        },
        "verdict": verdict,
        "probability_afd_better": None if panel.chance is None else round(panel.chance, 3),
        **heard_values(panel),
        "engines": {kind: _engine(engine) for kind, engine in question.engines},
        "notes": notes_of(question) + beyond_of(question, found.plans[0]),
        "layouts_tried": found.tried,
    }


def _engine(engine: Engine) -> dict[str, object]:
    return {"name": engine.name, "about": engine.about, "fit": dict(engine.fit)}


def _values(plan: Plan) -> dict[str, object]:
    times = plan.stages
    return {
        "kind": plan.kind,
        "attention": _side(plan.attention),
        "experts": _side(plan.experts),
        "prefill": None if plan.prefill is None else _side(plan.prefill),
        "prompt_parts": plan.prompt_parts,
        "ttft_one_part_ms": None if plan.decode_only else round(plan.prompt_alone * 1e3, 1),
        "micro_batches": plan.micro_batches,
        "drafts": str(plan.drafts),
        "tokens_per_step": round(plan.drafts.length, 3),
        "batch": plan.batch,
        "requests": plan.requests,
        "instances": plan.instances,
        "decoders": plan.decoders,
        "devices": plan.all_devices,
        "ranks": plan.ranks,
        "tpot_ms": _rounded(plan.tpot * 1e3, 3),
        "ttft_ms": None if plan.decode_only else round(plan.ttft * 1e3, 1),
        "tok_s": _rounded(plan.tok_s, 1),
        "tok_s_per_device": _rounded(plan.tok_s_per_device, 2),
        "tokens_per_joule": round(plan.tokens_per_joule, 4),
        "usd_per_mtok": _rounded(plan.usd_per_mtok, 5),
        "usd_per_hour": _rounded(plan.usd_per_hour, 2),
        "bound_by": "memory" if plan.limited_by == "memory" else plan.bound_by,
        "limited_by": plan.limited_by,
        "busiest": plan.busiest,
        "engine": plan.engine,
        "outside_of_measured": list(plan.outside),
        "error": round(plan.error, 3),
        "tpot_interval_80_ms": [_rounded(seconds * 1e3, 3) for seconds in plan.interval],
        "stages_us": {
            name: round(getattr(times, name) * 1e6, 2)
            for name in ("attention", "dispatch", "experts", "combine", "outside")
        },
        "layers": plan.layers,
    }


def _rounded(value: float, digits: int) -> float:
    """So many digits behind the point; where nothing would be left, the first three that are no 0."""
    return round(value, digits) or float(f"{value:.3g}")


def _side(side: Side) -> dict[str, object]:
    return {
        "hardware": side.hardware,
        "devices": side.devices,
        "nodes": side.nodes,
        "tensor_parallel": side.tensor_parallel,
    }
