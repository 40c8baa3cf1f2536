"""What every engine whose rows bear on a question says of it.

One engine of each kind leads: its plans are shown. The others are asked too, and the probability of the verdict is over
all of them: half of an engine's share is by how like its closest measured row is to its own plan, half goes to the one
with the best plan of those that have a row which bears on it, for a buyer would run that one. Where none has such a row
all count by likeness alone: the best of several guesses is the luckiest one. Values only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.perf.engine import Engine
from afserve.placement.planner.perf.engine_rows import BEARS
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import KINDS, KindPlans, Question, RankedPlans, plans_of_kind, ranked
from afserve.placement.planner.sensitivity import CLOSE, UNITS, merit, probability

FASTEST = 0.5
"""Share of the verdict that goes to the engine of each kind with the best plan; an assumption."""
_LEAST_LIKE = 1e-3
_WORTH_SAYING = 0.05


@dataclass(frozen=True, slots=True)
class Voice:
    """One engine's best plan. share: of the verdict. chance: that AFD is better under it, over those of the other
    kind; None where only one kind has plans."""

    kind: str
    engine: Engine
    plan: Plan
    share: float = 0.0
    chance: float | None = None

    @property
    def likeness(self) -> float:
        return self.plan.closest.likeness if self.plan.closest else 0.0

    @property
    def says(self) -> str:
        return "" if self.chance is None else side_of(self.chance)


@dataclass(frozen=True, slots=True)
class Panel:
    """Voices of both kinds, the leading one of each first. chance: that AFD is better; None where there is one kind."""

    voices: tuple[Voice, ...]
    chance: float | None

    def of(self, kind: str) -> tuple[Voice, ...]:
        return tuple(voice for voice in self.voices if voice.kind == kind)

    @property
    def several(self) -> bool:
        return any(len(self.of(kind)) > 1 for kind in KINDS)


def side_of(chance: float) -> str:
    """What a probability that AFD is better says: do, do not, or neither."""
    if abs(chance - 0.5) < CLOSE:
        return "even"
    return "do" if chance > 0.5 else "do not"


def asked_of_all(question: Question) -> tuple[Question, RankedPlans, Panel]:
    """The plans of the leading engines, and the panel. Of each kind the engine leads whose rows are most like its own
    best plan: the question that comes back says so."""
    leads = {kind: engine for kind, engine in question.engines if kind not in question.kinds}
    led: dict[str, KindPlans] = {}
    heard: list[Voice] = []
    for kind in question.kinds:
        asked = list(_asked(question, kind))
        voices = [Voice(kind, engine, best) for engine, plans in asked if (best := plans.best()) is not None]
        lead = max(voices, key=lambda voice: voice.likeness, default=None)
        leads[kind] = lead.engine if lead else question.setting_for(kind).engine
        led[kind] = next(plans for engine, plans in asked if engine is leads[kind])
        heard += [voice for voice in voices if voice.engine is leads[kind]]
        heard += [voice for voice in voices if voice.engine is not leads[kind]]
    if leads != {kind: question.setting_for(kind).engine for kind in leads}:
        question = replace(question, engines=tuple(leads.items()))
    found = ranked(led[kind] for kind in KINDS if kind in led)
    return question, found, _weighed(question, heard)


def _asked(question: Question, kind: str) -> Iterator[tuple[Engine, KindPlans]]:
    """What is found with each engine of that kind: with the question's own one first."""
    yield question.setting_for(kind).engine, plans_of_kind(question, kind)
    for of, engine in question.others:
        if of == kind:
            yield engine, plans_of_kind(replace(question, kinds=(kind,), engines=((kind, engine),)), kind)


def _weighed(question: Question, voices: Sequence[Voice]) -> Panel:
    shared = [
        voice for kind in KINDS for voice in _shared(question, [one for one in voices if one.kind == kind])
    ]
    sides = {kind: [voice for voice in shared if voice.kind == kind] for kind in KINDS}
    if not all(sides.values()):
        return Panel(tuple(shared), None)
    told = [
        replace(
            voice, chance=sum(other.share * _chance(question, voice, other) for other in sides[_rival(voice)])
        )
        for voice in shared
    ]
    total = sum(
        voice.share * voice.chance for voice in told if voice.kind == "afd" and voice.chance is not None
    )
    return Panel(tuple(told), total)


def _rival(voice: Voice) -> str:
    return "colocated" if voice.kind == "afd" else "afd"


def _chance(question: Question, one: Voice, other: Voice) -> float:
    afd, colocated = (one, other) if one.kind == "afd" else (other, one)
    return probability(question, afd.plan, colocated.plan)


def _shared(question: Question, voices: Sequence[Voice]) -> list[Voice]:
    """Voices of one kind with their shares, which add up to 1."""
    if not voices:
        return []
    likeness = [max(voice.likeness, _LEAST_LIKE) for voice in voices]
    bears = [voice for voice in voices if voice.likeness > BEARS]
    fastest = max(bears, key=lambda voice: merit(question, voice.plan), default=None)
    apart = FASTEST if fastest else 0.0
    return [
        replace(voice, share=(1 - apart) * alike / sum(likeness) + apart * (voice is fastest))
        for voice, alike in zip(voices, likeness, strict=True)
    ]


def differences(question: Question, panel: Panel, best: Plan) -> str:
    """Sentences: where engines say different things, and which profile beats the best plan; "" where none does."""
    return " ".join(filter(None, (_disagree(panel), _beaten(question, panel, best))))


def _disagree(panel: Panel) -> str:
    for kind in KINDS:
        voices = panel.of(kind)
        said = list(dict.fromkeys(voice.says for voice in voices))
        if len(said) > 1:
            parts = (
                f"{word} under {_names(voice for voice in voices if voice.says == word)}" for word in said
            )
            return f"Engines differ: {', '.join(parts)}."
    return ""


def _names(voices: Iterable[Voice]) -> str:
    named = [f"{voice.engine.name} ({voice.chance:.2f})" for voice in voices]
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))


def _beaten(question: Question, panel: Panel, best: Plan) -> str:
    """Which engine's plan has more of what was asked for than the best one; it does not lead, for its rows are less
    like this."""
    most = max(panel.voices, key=lambda voice: merit(question, voice.plan))
    ahead = merit(question, most.plan) / merit(question, best) - 1
    if ahead < _WORTH_SAYING:
        return ""
    if question.objective == "count":
        gain = f"need {most.plan.all_devices:,} devices for this rate, not {best.all_devices:,}"
    else:
        much = f"{ahead:.0%} more" if ahead < 1 else f"{1 + ahead:.1f} times the"
        gain = f"have {much} {UNITS[question.objective]}"
    return (
        f"{most.engine.name}'s profile beats the best plan: {describe(most.plan)} would {gain}, though its rows are "
        f"less like this ({most.likeness:.2f})."
    )
