"""`afserve simulate`: play the best plan event by event, layers first, then requests."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from afserve.cli.options import Within
from afserve.cli.plan_options import asked_question, question_flags

if TYPE_CHECKING:
    from afserve.placement.planner.plan import Plan
    from afserve.placement.planner.planner import Question
    from afserve.placement.planner.simulate import Played
    from afserve.placement.planner.simulate_requests import Served

_LOAD, _SHARE, _SEED = Within(0.001, 10), Within(0, 1), Within(0, (1 << 32) - 1, whole=True)
_SHOWN_RANKS = 8
_FILLINGS, _LEAST, _WARM = 4, 50, 0.25  # per rank; the first quarter of what ends is not counted


@click.command("simulate", short_help="Play a plan event by event.")
@question_flags
@click.option(
    "--steps",
    default=16,
    type=Within(2, 10000, whole=True),
    help="Decode steps per micro-batch.  [default: 16]",
)
@click.option(
    "--requests",
    type=Within(1, 200000, whole=True),
    help="Requests to play, over 8 ranks at most.  [default: four for every request that fits]",
)
@click.option(
    "--load",
    default=0.8,
    type=Within(0.001, 10),
    help="Arrival rate as a share of what the plan can serve.  [default: 0.8]",
)
@click.option(
    "--jitter",
    default=0.02,
    type=Within(0, 1),
    help="Mean random lengthening of every stage.  [default: 0.02]",
)
@click.option(
    "--stall",
    default=0.0,
    type=Within(0, 1),
    help="Chance that a stage takes five times as long.  [default: 0]",
)
@click.option("--seed", default=0, type=_SEED, help="Random seed.")
@click.option("--timeline", type=Path, metavar="FILE", help="Write a timeline for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    steps: int,
    requests: int | None,
    load: float,
    jitter: float,
    stall: float,
    seed: int,
    timeline: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Play the best plan event by event: ping-pong, random lengths, stragglers, arrivals.

    \b
    afserve simulate --model deepseek-v3 --pool h800=64 --pool h20=64 --tpot 50ms --input 2000 --output 500
    """
    from afserve.errors import DoesNotFitError
    from afserve.placement.planner.infeasible import explain
    from afserve.placement.planner.planner import answer

    question = asked_question(flags)
    best = answer(question).best()
    if best is None:
        raise DoesNotFitError(explain(question))
    calm = _play_layers(question, best, steps, 0.0, 0.0, seed) if best.kind == "afd" else None
    played = _play_layers(question, best, steps, jitter, stall, seed) if calm and (jitter or stall) else calm
    served = _play_requests(question, best, played, requests, load, seed)
    values = _values(question, best, (calm, played), served, load)
    click.echo(json.dumps(values, indent=2) if as_json else _text(best, values))
    if timeline is not None:
        _write_timeline(timeline, played)


def _play_layers(
    question: "Question", plan: "Plan", steps: int, jitter: float, stall: float, seed: int
) -> "Played":
    from afserve.placement.planner.simulate import Script, Simulation
    from afserve.placement.planner.simulate_stages import StageTable

    chips = {pool.chip.name: pool.chip for pool in question.pools}
    stages = StageTable(
        question.setting_for(plan.kind), plan, chips[plan.attention.hardware], chips[plan.experts.hardware]
    )
    script = Script(
        plan.ranks,
        plan.micro_batches,
        plan.layers,
        steps=steps,
        warm=max(2, steps // 4),
        jitter=jitter,
        stall_chance=stall,
        seed=seed,
    )
    simulation = Simulation(script, stages)
    _progress("layers", simulation.play())
    return simulation.result


def _play_requests(
    question: "Question", plan: "Plan", played: "Played | None", requests: int | None, load: float, seed: int
) -> "Served":
    import numpy as np

    from afserve.placement.planner.simulate_ranks import arrivals_for, rank_of, reading_pool
    from afserve.placement.planner.simulate_requests import Served, read_first, serve, together

    rng = np.random.default_rng(seed)
    rank = rank_of(question, plan, None if played is None else np.array(played.step_seconds))
    shown, ranks = min(plan.ranks, _SHOWN_RANKS), []
    pool = reading_pool(question, plan)
    if requests is None:
        requests = shown * max(_FILLINGS * rank.slots, _LEAST)
    shares = [max(requests // shown + (number < requests % shown), 1) for number in range(shown)]
    sent = [arrivals_for(question, plan, load, share, number, rng) for number, share in enumerate(shares)]
    if pool is not None:
        workers = max(round(pool.workers * shown / plan.ranks), 1)
        sent = read_first(replace(pool, workers=workers), sent)
    for number, arrivals in enumerate(sent):
        ranks.append(Served())
        _progress(f"requests, rank {number + 1} of {shown}", serve(rank, arrivals, rng, ranks[-1]))
    return together(ranks, _WARM)


def _progress(what: str, steps: Iterator[float]) -> None:
    for share in steps:
        _show(what, share)
    _show(what, 1.0)


def _show(what: str, share: float) -> None:
    if sys.stderr.isatty():
        end = "\r" if share < 1 else "\r\033[K"
        print(f"{what}: {share:4.0%}", end=end, file=sys.stderr, flush=True)


def _values(
    question: "Question",
    plan: "Plan",
    runs: "tuple[Played | None, Played | None]",
    served: "Served",
    load: float,
) -> dict[str, Any]:
    import numpy as np

    from afserve.placement.planner.infeasible import describe
    from afserve.placement.planner.simulate_requests import goodput

    def percentiles(seconds: list[float]) -> dict[str, float]:
        return {f"p{p}": round(float(np.percentile(seconds, p)) * 1e3, 3) for p in (50, 90, 99)}

    scale = plan.ranks / min(plan.ranks, _SHOWN_RANKS)
    values: dict[str, Any] = {
        "plan": describe(plan),
        "micro_batches": plan.micro_batches,
        "batch": plan.batch,
        "closed_form_tpot_ms": round(plan.tpot * 1e3, 3),
        "load": load,
        "requests": len(served.ended),
        "tpot_ms": percentiles(served.tpot),
        "ttft_ms": percentiles(served.ttft),
        "tok_s": round(scale * served.tokens / served.seconds, 1),
        "goodput_requests_per_s": round(
            scale * goodput(served, question.targets.tpot, question.targets.ttft), 3
        ),
    }
    calm, played = runs
    if calm is not None and played is not None:
        step, slower = (
            float(np.mean(run.step_seconds)) / question.setting.tokens_per_step for run in (calm, played)
        )
        decode = plan.tpot * (1 - plan.prefill_share)
        values["full_batch_tpot_ms"] = round(step * 1e3, 3)
        values["closed_form_tpot_ms"] = round(decode * 1e3, 3)
        values["difference"] = round(step / decode - 1, 4)
        values["stragglers"] = round(slower / step - 1, 4)
        values["idle"] = {name: round(1 - share, 4) for name, share in played.busy.items()}
    return values


def _text(plan: "Plan", values: dict[str, Any]) -> str:
    batches = (
        f"{plan.micro_batches} micro-batches of {plan.batch}"
        if plan.micro_batches > 1
        else f"batch {plan.batch}"
    )
    lines = [f"{values['plan']}; {batches} per rank"]
    if "idle" in values:
        idle = ", ".join(f"{name} {share:.0%}" for name, share in values["idle"].items())
        lines.append(
            f"full batch, decode: {values['full_batch_tpot_ms']} ms per token simulated, "
            f"{values['closed_form_tpot_ms']} in closed form ({values['difference']:+.1%}); with stragglers "
            f"{values['stragglers']:+.1%}; idle: {idle}"
        )
    else:
        lines.append(
            f"closed form: {values['closed_form_tpot_ms']} ms per token, every rank full, prompts included"
        )
    lines.append(
        f"played with random lengths and arrivals at {values['load']:.0%} of what the plan can serve:"
    )
    for name, label in (("tpot_ms", "TPOT"), ("ttft_ms", "TTFT")):
        found = values[name]
        lines.append(f"{label} ms: p50 {found['p50']:,.1f}, p90 {found['p90']:,.1f}, p99 {found['p99']:,.1f}")
    lines.append(
        f"{values['tok_s']:,.0f} tok/s, {values['goodput_requests_per_s']:,.2f} requests/s inside the targets, "
        f"{values['requests']:,} requests played"
    )
    return "\n".join(lines)


def _write_timeline(path: Path, played: "Played | None") -> None:
    from afserve.errors import ConfigError
    from afserve.placement.planner.timeline import perfetto_json

    if played is None:
        raise ConfigError(
            "--timeline: the best plan is colocated and has no ping-pong; add --kind afd", param="timeline"
        )
    try:
        path.write_text(perfetto_json(played.spans), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: {error.strerror}", param="timeline") from error
    click.echo(f"wrote {path}; open it at https://ui.perfetto.dev", err=True)
