"""A pilot: observe, predict, plan, then at most one change, and later a look at what came of it. It only says so.

A change for more is made as soon as what comes soon would miss its targets, and large enough for a while. A change for
less has to have been right for a while (`Rules.hold`), has to save something, and has to be worth what it costs. While
nodes come or go nothing is decided. `look` is given what is seen and returns what to do; it reads no clock.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from afserve.control.pilot.advice import Advice, Effect, Outcome
from afserve.control.pilot.classes import ClassAim, ClassMix
from afserve.control.pilot.coming import ComingDemand
from afserve.control.pilot.judge import Judge
from afserve.control.pilot.observed import Observed, SeenWindow
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.predict import DAY, Windows
from afserve.control.pilot.sizes import Demand, Expected, PoolSizes, TargetTimes
from afserve.control.wire.view_values import COMPARED, IN_TIME

_HOLD = 600.0
_BUSY = 0.9  # of a pool: from there on a little more load means much longer waits, and nothing is learnt
_LASTS = 4.0  # times `hold`: so long is a smaller size taken to be enough
_LEFT = 0.5  # of the headroom, that is to be left: pools grow with less, unless they have just changed
_KEEPS = 1.08  # times the nodes that are needed: so many a change for more may leave
_DEAR = 1.15  # times the nodes that are likely to be needed soon: pools grow to no more, whatever may come
_NEARER = tuple(0.96**power for power in range(10))  # parts of what may come
_LIKELY = 1.0  # deviations, beyond which pools grow and below which they shrink; they grow for more
_FURTHER = 1.15  # times what a jump has come to: it may go on
_FOR_BURSTS = 1.15  # times the prompts that are likely, for a day behind a burst, whose own raise no headroom
_FULL = 0.95  # of all nodes that there may be
_MINUTE = 60.0
_KEPT = 20  # advices and outcomes that are remembered


@dataclass(frozen=True, slots=True)
class PilotRules:
    """Seconds, but for a share. `gain`: so large a share of all nodes has to be saved at least. `hold`: for so long a
    smaller size must have been enough, and larger ones are to last. `again`: between two changes for more, at least,
    and no less than prompts are counted over. `measured`: from when a change is done until its effect is judged.
    `cost`: device-seconds that each device costs which comes or goes, once more for each second that the last change
    took."""

    windows: Windows = field(default_factory=Windows)
    hold: float = _HOLD
    again: float = 60.0
    measured: float = 120.0
    gain: float = 0.1
    deviations: float = 2.5
    cost: float = 5.0


def rules_for(hold: float) -> PilotRules:
    """With everything else in proportion where nodes may go sooner than after ten minutes."""
    share = min(hold / _HOLD, 1.0)
    short = max(60.0 * share, 2.0)
    windows = Windows(short=short, long=max(900.0 * share, 5 * short))
    return PilotRules(windows, hold, again=short, measured=max(120.0 * share, 2 * short), cost=5.0 * share)


@dataclass(slots=True)
class _Open:
    """An advice whose effect is not judged yet."""

    advice: Advice
    stands: Observed | None = None  # since when nobody has come or gone
    from_: Observed | None = None  # since when its effect is measured


class Policy:
    def __init__(
        self, planner: Planner, rules: PilotRules | None = None, classes: Sequence[ClassAim] = ()
    ) -> None:
        self.rules, self.judge = rules or PilotRules(), Judge()
        self._mix = ClassMix(classes, self.rules.hold)
        self.advices: deque[Advice] = deque(maxlen=_KEPT)
        self.outcomes: deque[Outcome] = deque(maxlen=_KEPT)
        self._planner = planner
        waits = min(planner.wanted.ttft, *(aim.ttft for aim in classes), math.inf)
        self._coming = ComingDemand(self.rules.windows, waits if waits < math.inf else 0.0)
        self._seen: deque[Observed] = deque()
        self._plans: deque[tuple[float, PoolSizes]] = deque()  # what would have been enough
        self._changed = self._stood = -math.inf
        self._late_since: Observed | None = None
        self._for_jump = False  # the last change was for more, and for a jump
        self._burst = -math.inf  # when the newest was seen last
        self._change_seconds = 0.0  # that the last change took until all was settled
        self._unsettled_since: float | None = None
        self._open: _Open | None = None
        self._numbers = self.judged = 0

    def figures(self) -> dict[str, float]:
        """What it goes by, for people."""
        newest = self.outcomes[-1].compared if self.outcomes else {}
        return {
            "rate": self._coming.rate.present_rate,
            "rate_soon": self._coming.rate.soon(self.rules.again, self.rules.deviations),
            "ttft_within": math.exp(self.judge.ttft.width),
            "tpot_within": math.exp(self.judge.tpot.width),
            **{f"{IN_TIME}{name}": share for name, share in self._mix.in_time.items()},
            **{
                f"{COMPARED}{time}_{what}": value
                for time, found in newest.items()
                for what, value in zip(("from", "to", "measured"), found, strict=True)
            },
        }

    # ---- one look

    def look(self, seen: Observed) -> Advice | None:
        """What to do now, if anything. Whoever does it need not say so: the next look shows it."""
        self._note(seen)
        self._judge(seen)
        if not self._settled(seen) or not (self._coming.lengths.known and self._planner.model.ready):
            return None
        if self._coming.rate.jumped:
            self._burst = seen.at
        wanted = self._corrected()
        soon = self._coming.within(self.rules.again + self._change_seconds, _LIKELY)
        if not self._coming.rate.jumped:  # what a jump needs is not needed behind it
            self._plans.append((seen.at, self._planner.best_effort(self._roomy(soon), wanted)))
        while self._plans and self._plans[0][0] < seen.at - self._hold:
            self._plans.popleft()
        calm = seen.at - self._changed >= self.rules.hold / 2
        least = self._roomy(soon, _LEFT * calm)
        if not self._planner.expect(seen.sizes, least, wanted).meets(wanted):
            most = self._coming.within(self.rules.hold, self.rules.deviations)
            further = _FURTHER if self._coming.rate.jumped else 1.0
            return self._more(seen, least, self._roomy(soon), self._roomy(most.times(further)), wanted)
        return self._fewer(seen, self._roomy(self._coming.within(self.rules.hold, _LIKELY)), wanted)

    def _roomy(self, demand: Demand, part: float = 1.0) -> Demand:
        """With such a part of the headrooms that both kinds of lateness ask for, and bursts."""
        bursty = self._seen[-1].at - self._burst < DAY
        rooms = max(self.judge.read_room.factor, _FOR_BURSTS * bursty), self.judge.made_room.factor
        read, made = (1 + part * (one - 1) for one in rooms)
        return replace(demand, rate=demand.rate * made, computed=demand.computed * read / made)

    def sizes(self, seen: Observed) -> PoolSizes | None:
        """Those of `look`."""
        advice = self.look(seen)
        return None if advice is None else advice.new

    def _note(self, seen: Observed) -> None:
        if self._seen and not seen.follows(self._seen[-1]):
            self._seen.clear()
            self._open = self._late_since = None
        if self._seen:
            happened = seen.since(self._seen[-1])
            self._coming.note_window(seen.at, happened, (self._seen[-1].running + seen.running) / 2)
            self._mix.note_window(seen.at, happened)
            if self._seen[-1].sizes == seen.sizes:
                self._planner.learn_rates(happened)
            else:
                self._seen.clear()  # what is measured is of one size
        self._seen.append(seen)
        while len(self._seen) > 2 and self._seen[1].at <= seen.at - self.rules.windows.short:
            self._seen.popleft()
        window = seen.since(self._seen[0])
        if window.seconds >= self.rules.windows.short / 2:
            self._correct(window)
            if seen.at - self._stood >= self.rules.windows.short:
                self._stood = seen.at
                self._note_standing(window)
        self._note_late(seen)

    def _note_late(self, seen: Observed) -> None:
        """Once for each short window, while sizes change too. Where nothing can be added, being late says nothing."""
        before = self._late_since = self._late_since or seen
        window, limits = seen.since(before), self._planner.limits
        load = window.load
        if seen.at - before.at < self.rules.windows.short or not (load.first and load.ended):
            return
        self._late_since = seen
        first, rest = self._mix.late_shares(window)
        if sum(seen.sizes) < _FULL * min(limits.budget, limits.most.total):
            minutes = self.rules.windows.short / _MINUTE
            # In a burst, whoever comes before more nodes do would be late with any headroom.
            if not self._coming.rate.jumped:
                self.judge.read_room.note_late(max(load.first_late / load.first, first), load.first, minutes)
            self.judge.made_room.note_late(max(load.rest_late / load.ended, rest), load.ended, minutes)

    def _note_standing(self, window: SeenWindow) -> None:
        """How wrong what is expected of sizes that stay has been: of no change it is surer."""
        if (expected := self._expected(window)) is not None:
            said = self._effect(expected)
            self.judge.tpot.note_standing(said.tpot, window.tpot)
            self.judge.ttft.note_standing(said.ttft, window.ttft)

    def _correct(self, window: SeenWindow) -> None:
        """Where the model and what is measured differ; of a pool that falls behind nothing is learnt."""
        expected = self._expected(window)
        if expected is None or not expected.fits or max(expected.busy) > _BUSY:
            return
        self.judge.rest.note_error(expected.tpot, window.tpot)
        self.judge.first.note_error(expected.ttft, window.ttft)
        self.judge.reading.note_error(expected.busy[0], window.busy[0] if window.sizes.prefill else None)

    def _expected(self, window: SeenWindow) -> Expected | None:
        """By the model, of the load that there was."""
        if not (self._coming.lengths.known and window.rate and self._planner.model.ready):
            return None
        return self._planner.expect(window.sizes, self._coming.lengths.demand(window.rate), TargetTimes())

    def _corrected(self) -> TargetTimes:
        """What the model has to promise so that what is wanted comes."""
        wanted, slower = self._mix.wanted(self._planner.wanted), max(self.judge.first.factor, 1.0)
        return TargetTimes(
            wanted.ttft / slower,
            wanted.tpot / self.judge.rest.factor,
            wanted.late,
            min(wanted.busy / self.judge.reading.factor, 0.95),
            tuple(replace(one, ttft=one.ttft / slower) for one in wanted.classes),
        )

    def _settled(self, seen: Observed) -> bool:
        if not seen.settled:
            if self._unsettled_since is None:
                self._unsettled_since = seen.at
            return False
        if self._unsettled_since is not None:
            self._change_seconds = seen.at - self._unsettled_since
            self._unsettled_since = None
        return True

    # ---- what to do

    def _more(
        self, seen: Observed, soon: Demand, likely: Demand, later: Demand, wanted: TargetTimes
    ) -> Advice | None:
        again = max(self.rules.again, self._coming.counted)  # sooner, the same prompts would count twice
        if seen.at - self._changed < again and not self._coming.rate.jumped:
            return None
        far, new = self._planner.best_effort(later, wanted), self._ahead(likely, later, wanted)
        both = new.at_least(seen.sizes)  # what is there and may be needed again soon stays
        keeps = both.total <= _KEEPS * far.total or self._coming.lengths.young
        if keeps and self._planner.limits.allow(both):
            new = both
        if not self._better(seen.sizes, new, soon, wanted):
            return None
        return self._advise(seen, new, f"{soon.rate:.3g} requests/s soon would miss their targets")

    def _ahead(self, likely: Demand, later: Demand, wanted: TargetTimes) -> PoolSizes:
        """What is enough for a while, unless it is far more than what is likely needs: large pools bring less for each
        node."""
        least = self._planner.best_effort(likely, wanted)
        parts = (self._planner.best_effort(later.times(share), wanted) for share in _NEARER)
        return next((one for one in parts if one.total <= _DEAR * least.total), least)

    def _better(self, old: PoolSizes, new: PoolSizes, demand: Demand, wanted: TargetTimes) -> bool:
        """Whether another size is any help where none is enough."""
        if new == old:
            return False
        here, there = (self._planner.expect(sizes, demand, wanted) for sizes in (old, new))
        return there.meets(wanted) or _pressed(there) < 0.98 * _pressed(here)

    def _fewer(self, seen: Observed, later: Demand, wanted: TargetTimes) -> Advice | None:
        waited = seen.at - self._changed
        if self._coming.rate.jumped or not self._plans:
            return None
        if waited < self._hold or seen.at - self._plans[0][0] < 0.9 * self._hold:
            return None
        new = self._planner.smallest(later, wanted)
        if new is None or any(one.total > new.total for _, one in self._plans):
            new = max((one for _, one in self._plans), key=lambda one: one.total)
        saved = seen.sizes.total - new.total
        if saved < max(1.0, self.rules.gain * seen.sizes.total):
            return None
        if not self._planner.expect(new, later, wanted).meets(wanted):
            return None
        moved = sum(abs(a - b) for a, b in zip(seen.sizes, new, strict=True))
        if saved * _LASTS * self.rules.hold < moved * (self.rules.cost + 2 * self._change_seconds):
            return None
        return self._advise(seen, new, f"{saved} fewer are enough for {later.rate:.3g} requests/s")

    @property
    def _hold(self) -> float:
        """Seconds in which fewer must have been enough; behind a jump as long as it costs to start nodes anew."""
        if not self._for_jump:
            return self.rules.hold
        return min(max(self.rules.again, self.rules.cost + 2 * self._change_seconds), self.rules.hold)

    def _said(self, seen: Observed, new: PoolSizes) -> bool:
        """Whether the same was said and nobody did it: it is said again after a while only."""
        last = self.advices[-1] if self.advices else None
        if last is None or (last.old, last.new) != (seen.sizes, new):
            return False
        return seen.at - last.at < self.rules.hold

    def _advise(self, seen: Observed, new: PoolSizes, why: str) -> Advice | None:
        if self._said(seen, new):
            return None
        self._numbers += 1
        present = self._coming.now()
        after, stay = (
            self._effect(self._planner.expect(at, present, TargetTimes())) for at in (new, seen.sizes)
        )
        advice = Advice(self._numbers, seen.at, seen.sizes, new, why, after, stay)
        self.advices.append(advice)
        if self._open is None or self._open.advice.old != seen.sizes:
            self._open = _Open(advice)
        more = new.total > seen.sizes.total
        self._for_jump = more and (self._coming.rate.jumped or self._for_jump)
        self._changed = seen.at
        self._plans.clear()
        return advice

    def _effect(self, expected: Expected) -> Effect:
        """No longer than until it would be something else: what a pool that falls behind comes to has no end."""
        ttft = min(expected.ttft * self.judge.first.factor, self.rules.hold)
        tpot = min(expected.tpot * self.judge.rest.factor, self.rules.hold)
        return Effect(ttft, tpot, self.judge.ttft.around(ttft), self.judge.tpot.around(tpot))

    # ---- what came of it

    def _judge(self, seen: Observed) -> None:
        """Once everything has been as it is for a while since the advice: at the new sizes, or still at the old.
        Answers count when they end, so that those are waited for first that ran while nodes came or went."""
        waits = self._open
        if waits is None:
            return
        advice = waits.advice
        if not seen.settled:
            waits.stands = waits.from_ = None
        elif seen.sizes not in (advice.old, advice.new):
            self._open = None  # somebody did something else
        elif waits.stands is None or waits.stands.sizes != seen.sizes:
            waits.stands, waits.from_ = seen, None
        elif waits.from_ is None:
            if seen.at - waits.stands.at >= min(self._coming.answer_seconds, self.rules.hold):
                waits.from_ = seen
        elif seen.at - waits.from_.at >= self.rules.measured:
            self._open = None
            window = seen.since(waits.from_)
            came = Outcome(advice, seen.at, window.sizes == advice.new, window.ttft, window.tpot)
            self.judge.ttft.compare(came.said.ttft, came.compared.get("ttft"))
            self.judge.tpot.compare(came.said.tpot, came.compared.get("tpot"))
            self.judged += 1
            self.outcomes.append(came)


def _pressed(expected: Expected) -> float:
    return max(expected.busy) if expected.fits else math.inf
