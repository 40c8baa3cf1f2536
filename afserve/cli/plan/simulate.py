"""`afserve simulate`: play the best plan event by event, layers first, then requests."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from afserve.cli.options import Within, group_options, option, output_file
from afserve.cli.plan.flags import question_flags
from afserve.cli.plan.losses import LossFlags, long_run, loss_text, recovery_of, said_of, typed_losses
from afserve.cli.plan.options import asked_question
from afserve.cli.plan.piloted import PilotFlags, check_pilot, pilot_text, with_pilot
from afserve.cli.plan.play import MOST_REQUESTS, PlayedRequests, play_layers
from afserve.errors import ConfigError, DoesNotFitError
from afserve.placement.planner.infeasible import describe, explain
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.simulate.layers import Played, perfetto_json
from afserve.placement.planner.simulate.losses import again_second, outages, roles_of
from afserve.placement.planner.simulate.requests import (
    ServedRequests,
    agentx,
    goodput,
    percentile,
    share_inside,
)
from afserve.placement.planner.simulate.struck import Struck

_LOAD, _SHARE, _SEED = Within(0.001, 10), Within(0, 1), Within(0, (1 << 32) - 1, whole=True)
_MOST_RANKS = 20_000


@dataclass(frozen=True, slots=True)
class PlayFlags:
    """What is played, and how unevenly."""

    steps: int = option(
        default=16, type=Within(2, 10000, whole=True), help="Decode steps per micro-batch.  [default: 16]"
    )
    requests: int | None = option(
        type=Within(1, MOST_REQUESTS, whole=True),
        help="Requests to play, over 8 ranks at most.  [default: four for every request that fits, 200000 at most]",
    )
    load: float = option(
        default=0.8,
        type=Within(0.001, 10),
        help="Arrival rate as a share of what the plan can serve.  [default: 0.8]",
    )
    jitter: float = option(
        default=0.02, type=Within(0, 1), help="Mean random lengthening of every stage.  [default: 0.02]"
    )
    stall: float = option(
        default=0.0, type=Within(0, 1), help="Chance that a stage takes five times as long.  [default: 0]"
    )


@click.command("simulate", short_help="Play a plan event by event.")
@question_flags
@group_options(PlayFlags, LossFlags, PilotFlags)
@click.option("--seed", default=0, type=_SEED, help="Random seed.")
@click.option("--timeline", type=output_file, metavar="FILE", help="Write a timeline for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    asked: PlayFlags,
    losses: LossFlags,
    piloting: PilotFlags,
    seed: int,
    timeline: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Play the best plan event by event: ping-pong, random lengths, stragglers, arrivals, lost devices.

    \b
    afserve simulate --model deepseek-v3 --pool h800=64 --pool h20=64 --tpot 50ms --input 2000 --output 500
    """
    check_pilot(piloting)
    recovery = recovery_of(losses)
    question = asked_question(flags)
    best = answer(question).best()
    if best is None:
        raise DoesNotFitError(explain(question))
    if piloting.pilot:
        values = with_pilot(question, best, piloting, asked.load, asked.requests, seed)
        click.echo(json.dumps(values, indent=2) if as_json else pilot_text(values))
        return
    _check_size(best)
    _check_timeline(timeline, best)
    roles = roles_of(question, best, recovery) if losses.asked else ()
    happened = outages(roles, typed_losses(losses, roles))
    endured = long_run(question, best, roles, losses, recovery, seed) if losses.mtbf is not None else None
    calm = play_layers(question, best, asked.steps, 0.0, 0.0, seed) if best.kind == "afd" else None
    played = (
        play_layers(question, best, asked.steps, asked.jitter, asked.stall, seed)
        if calm and (asked.jitter or asked.stall)
        else calm
    )
    requested = PlayedRequests(question, best, played, asked.requests, asked.load, seed)
    values = _values(
        question, best, (calm, played), requested.play_requests(Struck((), recovery, 0.0))[0], asked.load
    )
    if happened:
        struck = Struck(happened, recovery, again_second(question, best))
        values |= _with_losses(question, values, requested, struck)
    if endured is not None:
        values["long_run"] = endured
    click.echo(json.dumps(values, indent=2) if as_json else _text(best, values))
    if timeline is not None and played is not None:
        _write_timeline(timeline, played)


def _values(
    question: Question,
    plan: Plan,
    runs: tuple[Played | None, Played | None],
    served: ServedRequests,
    load: float,
) -> dict[str, Any]:

    values: dict[str, Any] = {
        "plan": describe(plan),
        "micro_batches": plan.micro_batches,
        "batch": plan.batch,
        "closed_form_tpot_ms": round(plan.tpot * 1e3, 3),
        "load": load,
        **_of_requests(question, served),
    }
    calm, played = runs
    if calm is not None and played is not None:
        step, slower = (float(np.mean(run.step_seconds)) / plan.drafts.length for run in (calm, played))
        decode = plan.tpot * (1 - plan.prefill_share)
        values["full_batch_tpot_ms"] = round(step * 1e3, 3)
        values["closed_form_tpot_ms"] = round(decode * 1e3, 3)
        values["difference"] = round(step / decode - 1, 4)
        values["stragglers"] = round(slower / step - 1, 4)
        values["idle"] = {name: round(1 - share, 4) for name, share in played.busy.items()}
    return values


def _of_requests(question: Question, served: ServedRequests) -> dict[str, Any]:
    def percentiles(seconds: list[float]) -> dict[str, float]:
        return {f"p{p}": round(percentile(seconds, served.weight, p / 100) * 1e3, 3) for p in (50, 90, 99)}

    targets = question.targets
    return {
        "requests": len(served.ended),
        "tpot_ms": percentiles(served.tpot),
        "ttft_ms": percentiles(served.ttft),
        "tok_s": round(served.tokens / served.seconds, 1),
        "goodput_requests_per_s": round(goodput(served, targets.tpot, targets.ttft), 3),
        "tok_s_per_user_agentx": round(agentx(served, question.setting.workload.mean_answer), 2),
        "share_inside_targets": round(share_inside(served, targets.tpot, targets.ttft), 4),
    }


def _with_losses(
    question: Question, calm: dict[str, Any], requested: PlayedRequests, struck: Struck
) -> dict[str, Any]:
    """The values of requests with losses; the `calm` ones are kept as `undisturbed`. Raises ConfigError where a device
    is lost when nothing is played any more."""
    last, ends = struck.outages[-1].at, requested.ends
    if last >= ends:
        raise ConfigError(
            f"--lose: {last:g} s is after the last request, which ends at {ends:.1f} s; add --requests N"
        )
    served, losing = requested.play_requests(struck)
    values = _of_requests(question, served)
    stalls = {
        f"p{p}": round(percentile(served.stalls, [1.0] * len(served.stalls), p / 100), 3)
        for p in (50, 99)
        if served.stalls
    }
    return values | {
        "losses": said_of(struck.outages),
        "moved": {
            "requests": losing.moved,
            "next_token_s": stalls or None,
            "tokens_again": round(losing.again),
        },
        "undisturbed": {name: calm[name] for name in values},
    }


def _text(plan: Plan, values: dict[str, Any]) -> str:
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
        f"{values['tok_s']:,.0f} tok/s from the first arrival to the last token, while ranks fill and empty too; "
        f"{values['goodput_requests_per_s']:,.2f} requests/s inside the targets, {values['requests']:,} requests played"
    )
    lines.append(
        f"AgentX's metric, 1 / P90 of latency per output token: {values['tok_s_per_user_agentx']:,.1f} tok/s"
    )
    missed = 1 - values["share_inside_targets"]
    lines += [f"{missed:.1%} of the requests miss a target"] if missed > 0 else []
    return "\n".join(lines + loss_text(values))


def _check_size(plan: Plan) -> None:
    if plan.ranks > _MOST_RANKS:
        raise ConfigError(
            f"--pool: the plan has {plan.ranks:,} attention ranks, and {_MOST_RANKS:,} is the most that are played; "
            "ask about a part of it with a smaller --pool or --attention-devices"
        )


def _check_timeline(path: Path | None, plan: Plan) -> None:
    """Before anything is played."""
    if path is not None and plan.kind != "afd":
        raise ConfigError("--timeline: the best plan is colocated and has no ping-pong; add --kind afd")


def _write_timeline(path: Path, played: Played) -> None:
    try:
        path.write_text(perfetto_json(played.spans), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: {error.strerror}") from error
    click.echo(f"wrote {path}; open it at https://ui.perfetto.dev", err=True)
