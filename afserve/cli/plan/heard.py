"""Which engines were heard on a question, by what rule, and what each says: lines for people, values for programs."""

from afserve.cli.plan.aligned import aligned
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.panel import FASTEST, Panel, Voice
from afserve.placement.planner.perf.engine_rows import DEVICES, LENGTHS, REQUESTS, likeness_of
from afserve.placement.planner.question import Question

HEAD = (
    "engine",
    "kind",
    "share",
    "like",
    "closest measured row",
    "its best plan",
    "tok/s/dev",
    "$/Mtok",
    "AFD better",
)
RULE = (
    "Likeness is 1 for the same model, chip, weights, layout, prompts and drafts. Another model makes it "
    f"{likeness_of('model'):.2f} times as much, another chip {likeness_of('chip'):.2f}, other weights "
    f"{likeness_of('experts'):.2f}, another layout {likeness_of('layout'):.2f}, prompts read elsewhere "
    f"{likeness_of('prompts'):.2f}, another mode of drafts {likeness_of('drafts'):.2f}; lengths {LENGTHS:g} doublings "
    f"apart, requests {REQUESTS:g} or devices {DEVICES:g} make it 0.61 times as much each. Models and chips are "
    f"compared by their figures, whatever their names. Of the verdict, {FASTEST:.0%} go to the engine of each kind "
    "with the best plan among those whose closest row is more like it than another model on another chip, the rest to "
    "all by their likeness"
)


def heard_lines(question: Question, panel: Panel) -> list[str]:
    """A table of the engines that were asked, where there were several."""
    if not panel.several:
        return []
    return [*aligned([HEAD, *heard_rows(panel)], left=(0, 1, 4, 5)), RULE]


def heard_rows(panel: Panel) -> list[tuple[str, ...]]:
    return [_row(voice) for voice in panel.voices]


def _row(voice: Voice) -> tuple[str, ...]:
    plan = voice.plan
    return (
        voice.engine.name,
        "AFD" if voice.kind == "afd" else voice.kind,
        f"{voice.share:.2f}",
        f"{voice.likeness:.2f}",
        str(plan.closest or "none"),
        describe(plan).replace("colocated on ", "").replace("AFD with ", ""),
        f"{plan.tok_s_per_device:,.0f}",
        f"{plan.usd_per_mtok:.3f}",
        "-" if voice.chance is None else f"{voice.chance:.2f}",
    )


def heard_values(panel: Panel) -> dict[str, object]:
    """JSON values: the engines that were asked, and the rule that says how like their rows are."""
    return {
        "heard": [
            {
                "engine": voice.engine.name,
                "kind": voice.kind,
                "share": round(voice.share, 3),
                "likeness": round(voice.likeness, 3),
                "closest_row": str(voice.plan.closest) if voice.plan.closest else None,
                "plan": describe(voice.plan),
                "tok_s_per_device": round(voice.plan.tok_s_per_device, 2),
                "usd_per_mtok": round(voice.plan.usd_per_mtok, 5),
                "probability_afd_better": None if voice.chance is None else round(voice.chance, 3),
                "says": voice.says or None,
            }
            for voice in panel.voices
        ],
        "likeness_rule": RULE,
    }
