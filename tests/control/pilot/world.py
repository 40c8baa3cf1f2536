"""Loads that a pilot is shown, and pools whose nodes have known rates."""

from dataclasses import dataclass, field, replace

from afserve.control.pilot.advice import Advice
from afserve.control.pilot.measured import MeasuredModel, NodeSeconds
from afserve.control.pilot.observed import Observed, PoolLoad
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import PilotRules, Policy
from afserve.control.pilot.sizes import Demand, Limits, PoolSizes, TargetTimes

RATES = NodeSeconds(read=1e-4, decode=1e-3, experts=5e-4, calm_first=0.1, calm_rest=0.02)
WANTED = TargetTimes(ttft=1.0, tpot=0.05)
LIMITS = Limits(PoolSizes(1, 1, 1), PoolSizes(40, 40, 40), 100)


@dataclass
class Told:
    """A world that says of each moment what its rates make of the load, and does at once what it is told."""

    sizes: PoolSizes = field(default_factory=lambda: PoolSizes(2, 4, 3))
    limits: Limits = LIMITS
    rules: PilotRules = field(default_factory=PilotRules)
    prompt: float = 1000.0
    answer: float = 100.0
    step: float = 20.0
    follows: bool = True
    wanted: TargetTimes = WANTED

    def __post_init__(self) -> None:
        self.model = MeasuredModel(RATES if self.sizes.experts else replace(RATES, experts=0.0))
        self.policy = Policy(Planner(MeasuredModel(), self.wanted, self.limits), self.rules)
        self.at, self.load = 0.0, PoolLoad()
        self.advices: list[Advice] = []

    def play(self, rate: float, seconds: float) -> list[Advice]:
        """What is advised meanwhile."""
        given = len(self.advices)
        until = self.at + seconds
        while self.at < until - 1e-6:
            self.at += self.step
            self.load = self._later(rate)
            advice = self.policy.look(self.seen())
            if advice is not None:
                self.advices.append(advice)
                if self.follows:
                    self.sizes = advice.new
        return self.advices[given:]

    def seen(self, *, settled: bool = True) -> Observed:
        return Observed(self.at, self.sizes, self.load, settled)

    def _later(self, rate: float) -> PoolLoad:
        demand = Demand(rate, self.prompt, self.answer, self.prompt)
        found = self.model.expect(self.sizes, demand, WANTED)
        before, came = self.load, rate * self.step
        busy = [min(one, 1.0) * size * self.step for one, size in zip(found.busy, self.sizes, strict=True)]
        return PoolLoad(
            came=before.came + came,
            prompt_tokens=before.prompt_tokens + came * self.prompt,
            first=before.first + came,
            first_seconds=before.first_seconds + came * min(found.ttft, 100.0),
            ended=before.ended + came,
            answer_tokens=before.answer_tokens + came * self.answer,
            rest_tokens=before.rest_tokens + came * (self.answer - 1),
            rest_seconds=before.rest_seconds + came * (self.answer - 1) * found.tpot,
            prefill_busy=before.prefill_busy + busy[0],
            decode_busy=before.decode_busy + busy[1],
            experts_busy=before.experts_busy + busy[2],
        )
