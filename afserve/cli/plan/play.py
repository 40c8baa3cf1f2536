"""Plays a plan for `afserve simulate`, layers and requests, with its progress on a terminal."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from afserve.errors import ConfigError
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.simulate.layer_stages import StageTable
from afserve.placement.planner.simulate.layers import Played, Script, Simulation
from afserve.placement.planner.simulate.losses import reading_pace
from afserve.placement.planner.simulate.ranks import arrivals_for, rank_of, reading_pool
from afserve.placement.planner.simulate.requests import Arrivals, Rank, ServedRequests, read_first, together
from afserve.placement.planner.simulate.struck import Losing, Struck

SHOWN_RANKS = 8
_FILLINGS, _LEAST, _WARM = 4, 50, 0.25  # per rank; the first quarter of what ends is not counted
MOST_REQUESTS = 200_000
LONGEST = 1e8  # ranks of all passes, or requests of all steps: a quarter of a minute of one core
_EACH = 256  # ranks that take as long as a pass by itself, or requests as a step


def play_layers(question: Question, plan: Plan, steps: int, jitter: float, stall: float, seed: int) -> Played:
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    stages = StageTable(
        question.setting_of(plan), plan, chips[plan.attention.hardware], chips[plan.experts.hardware]
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
    _check_passes(script)
    simulation = Simulation(script, stages)
    _progress("layers", simulation.play())
    return simulation.result


def _check_passes(script: Script) -> None:
    one = script.micro_batches * script.layers * (_EACH + script.ranks)
    if (script.steps + script.warm) * one <= LONGEST:
        return
    most = min(int(LONGEST / one) - 2, int(LONGEST / one / 1.25))  # as many steps as `warm` leaves
    if most < 2:
        raise ConfigError(
            f"--pool: the plan has {script.ranks:,} attention ranks and {script.layers:,} layers, too many to play; "
            "ask about a part of it with a smaller --pool or --attention-devices"
        )
    raise ConfigError(
        f"--steps {script.steps}: of a plan of {script.ranks:,} ranks, {script.micro_batches} micro-batches and "
        f"{script.layers:,} layers at most {most:,} are played, in half a minute; give fewer"
    )


class PlayedRequests:
    """The same requests for several plays: undisturbed, and with losses. ends: when the last one did, seconds."""

    def __init__(
        self,
        question: Question,
        plan: Plan,
        played: Played | None,
        requests: int | None,
        load: float,
        seed: int,
    ) -> None:

        rng = np.random.default_rng(seed)
        self._plan, self._seed = plan, seed
        self._rank: Rank = rank_of(question, plan, None if played is None else np.array(played.step_seconds))
        self._pool = reading_pool(question, plan)
        shown = min(plan.all_ranks, SHOWN_RANKS)
        if requests is None:
            requests = min(shown * max(_FILLINGS * self._rank.slots, _LEAST), MOST_REQUESTS)
        arrivals = len(question.setting.workload.arrival)
        if arrivals and arrivals < shown:
            raise ConfigError(
                f"--trace: it has {arrivals} requests, and {shown} of the plan's {plan.all_ranks:,} attention ranks "
                "are played with one each at least; give a longer trace or a smaller layout"
            )
        shares = [max(requests // shown + (number < requests % shown), 1) for number in range(shown)]
        self._sent: list[Arrivals] = [
            arrivals_for(question, plan, load, share, number, rng) for number, share in enumerate(shares)
        ]
        self._check_steps(load)
        self.ends = 0.0

    def _check_steps(self, load: float) -> None:
        """A rank whose requests come slower than it could serve them holds fewer at a time, and takes more steps."""
        rank, plan = self._rank, self._plan
        held = np.arange(1, rank.slots + 1)
        enough = held >= load * plan.tok_s / plan.all_ranks / rank.tokens_per_step * rank.step[1:]
        at_once = int(held[np.argmax(enough)]) if enough.any() else rank.slots
        requests, tokens = (sum(map(count, self._sent)) for count in (_requests, _tokens))
        steps = tokens / rank.tokens_per_step / at_once
        most = int(LONGEST / (_EACH + at_once))
        if steps > most:
            raise ConfigError(
                f"--requests {requests}: their {tokens:,.0f} tokens take about {steps:,.0f} steps at --load {load:g}, "
                f"and at most {most:,} are played, in half a minute; give fewer --requests or shorter answers"
            )

    def play_requests(self, struck: Struck) -> tuple[ServedRequests, Losing]:
        """(all ranks together, the ranks that lose). Of several instances that decode one loses all that is lost; the
        others go on as without losses, but for what only reads prompts."""
        sent, plan = self._sent, self._plan
        if self._pool is not None:
            workers = max(round(self._pool.workers * len(sent) / plan.all_ranks), 1)
            pace = reading_pace(struck.outages, plan.kind, all_end=struck.recovery.all_end)
            sent = read_first(replace(self._pool, workers=workers), sent, pace)
        parts = [Losing(self._rank, plan.all_ranks, sent, struck, self._seed)]
        if struck.outages and plan.decoders > 1:
            calm, others = replace(struck, outages=()), plan.all_ranks - plan.ranks
            parts = [
                Losing(self._rank, plan.ranks, sent[: plan.ranks], struck, self._seed),
                Losing(self._rank, others, sent[plan.ranks :] or sent, calm, self._seed),
            ]
        for losing in parts:
            for number, share in losing.play():
                _show(f"requests, rank {number + 1} of {len(losing.served)}", share)
        _show("requests", 1.0)
        served = together(
            [one for losing in parts for one in losing.served],
            _WARM,
            [weight for losing in parts for weight in losing.weights],
        )
        losing = parts[0]
        self.ends = served.seconds
        return served, losing


def _requests(sent: Arrivals) -> int:
    return len(sent.seconds)


def _tokens(sent: Arrivals) -> float:
    return float(sent.answer.sum())


def _progress(what: str, steps: Iterator[float]) -> None:
    for share in steps:
        _show(what, share)
    _show(what, 1.0)


def _show(what: str, share: float) -> None:
    if sys.stderr.isatty():
        end = "\r" if share < 1 else "\r\033[K"
        print(f"{what}: {share:4.0%}", end=end, file=sys.stderr, flush=True)
