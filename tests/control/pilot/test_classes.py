"""Classes of service in what a pilot plans for: their times, their turns, and which of them are late."""

import math
from dataclasses import dataclass, field

import pytest

from afserve.control.pilot.classes import ClassAim, ClassMix
from afserve.control.pilot.measured import MeasuredModel
from afserve.control.pilot.observed import Observed, PoolLoad, SeenWindow
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import Policy
from afserve.control.pilot.queue import QueueWait
from afserve.control.pilot.replay.counts import Packet, PacketCounts
from afserve.control.pilot.sizes import Demand, FirstTokenTarget, PoolSizes, TargetTimes
from afserve.control.wire.load_values import ClassCounts
from tests.control.pilot.world import LIMITS, Told

NEVER = math.inf
CHAT = ClassAim("chat", -10, ttft=0.5, tpot=0.03)
BULK = ClassAim("bulk", 10, ttft=60.0)
SIZES = PoolSizes(2, 4, 3)


def window(came: float, **classes: ClassCounts) -> SeenWindow:
    return SeenWindow(10.0, SIZES, PoolLoad(came=came), classes=classes)


def test_without_classes_what_the_server_wants_counts():
    own = TargetTimes(1.0, 0.05)
    assert ClassMix((), 600).wanted(own) is own
    silent = ClassMix((CHAT, BULK), 600)
    silent.note_window(10.0, window(5))
    assert silent.wanted(own) is own


def test_those_that_come_count_each_behind_the_turns_before_it():
    mix = ClassMix((CHAT, BULK, ClassAim("never", ttft=0.001)), 600)
    mix.note_window(10.0, window(10, chat=ClassCounts(2), bulk=ClassCounts(5)))
    wanted = mix.wanted(TargetTimes(1.0, 0.05, busy=0.7))
    assert wanted.tpot == 0.03 and wanted.busy == 0.7 and wanted.ttft == NEVER
    assert wanted.classes == (
        FirstTokenTarget(0.5, 0.0, 0.2),
        FirstTokenTarget(1.0, 0.2, 0.5),  # those of no class, by the server's time
        FirstTokenTarget(60.0, 0.5, 1.0),
    )


def test_no_class_of_none_comes_of_requests_in_part():
    """A replay's packets stand for 2.5 requests each, or for a third of one; all of them are of a class."""
    server = TargetTimes(1.0, 0.05)
    for weight in (2.5, 1 / 3):
        counts, mix, seen = PacketCounts(server, (CHAT, BULK)), ClassMix((CHAT, BULK), 60), None
        for look in range(1, 40):
            for number in range(3 + look % 4):
                counts.note_came(Packet(10.0 * look, 100, 10, weight, number % 2))
            now = Observed(10.0 * look, SIZES, counts.load(), classes=counts.of_classes())
            if seen is not None:
                mix.note_window(now.at, now.since(seen))
                assert [one.ttft for one in mix.wanted(server).classes] == [CHAT.ttft, BULK.ttft]
            seen = now


def test_a_class_that_comes_no_more_is_forgotten_after_a_while():
    mix = ClassMix((CHAT, BULK), 600)
    mix.note_window(10.0, window(10, chat=ClassCounts(2), bulk=ClassCounts(8)))
    mix.note_window(500.0, window(10, bulk=ClassCounts(10)))
    assert mix.wanted(TargetTimes(1.0, 0.05)).tpot == 0.03
    mix.note_window(620.0, window(10, bulk=ClassCounts(10)))
    later = mix.wanted(TargetTimes(1.0, 0.05))
    assert later.tpot == 0.05 and later.classes == (FirstTokenTarget(60.0, 0.0, 1.0),)


@pytest.mark.parametrize("share", [0.3, 0.8, 0.97])
@pytest.mark.parametrize("first", [0.1, 0.5, 0.9])
def test_who_is_read_first_waits_less_and_the_others_as_much_more(share, first):
    """All waits together stay what they are without turns."""
    wait = QueueWait(2.0, 3, share, 1.5)

    def mean(ahead: float, upto: float) -> float:
        return -wait.chance / math.log(wait.longer(1.0, ahead, upto) / wait.chance)

    sooner, later, alike = mean(0.0, first), mean(first, 1.0), wait.mean
    assert sooner < alike < later
    assert first * sooner + (1 - first) * later == pytest.approx(alike)


def test_the_first_class_is_in_time_where_the_pool_falls_behind_for_the_others():
    wait = QueueWait(1.0, 2, 1.2, 1.0)
    assert wait.longer(5.0) == 1.0 and wait.longer(5.0, 0.0, 0.5) < 0.05
    assert wait.late(TargetTimes(NEVER, classes=(FirstTokenTarget(5.0, 0.0, 0.5),)), 0.0) < 0.05


@dataclass
class ToldOfClasses(Told):
    """Each request is of a class, by its share; so many of a class are late."""

    shares: dict[str, float] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        planner = Planner(MeasuredModel(), TargetTimes(1.0, 0.05), LIMITS)
        self.policy = Policy(planner, self.rules, (CHAT, BULK))
        self.counts: dict[str, ClassCounts] = {}

    def seen(self, *, settled: bool = True) -> Observed:
        for name, share in self.shares.items():
            came, late = int(self.load.came * share), int(self.load.came * share * self.late.get(name, 0.0))
            self.counts[name] = ClassCounts(came, came, late, came, 0, came)
        return Observed(self.at, self.sizes, self.load, settled, classes=dict(self.counts))


@pytest.mark.slow
def test_pools_grow_for_a_class_that_is_in_a_hurry_and_not_for_one_that_is_not():
    hurried, patient = ToldOfClasses(shares={"chat": 1.0}), ToldOfClasses(shares={"bulk": 1.0})
    for told in (hurried, patient):
        told.play(10, 4000)
    assert hurried.sizes.total > patient.sizes.total
    assert hurried.model.expect(hurried.sizes, Demand(10, 1000, 100, 1000), TargetTimes()).tpot <= CHAT.tpot


@pytest.mark.slow
def test_a_class_that_is_late_alone_raises_what_is_kept_free():
    calm, late = (ToldOfClasses(shares={"chat": 0.1, "bulk": 0.9}) for _ in range(2))
    late.late = {"chat": 0.3}
    for told in (calm, late):
        told.play(20, 900)
    assert late.policy.judge.read_room.factor > calm.policy.judge.read_room.factor
    figures = late.policy.figures()
    assert figures["in_time_chat"] == pytest.approx(0.7, abs=0.05) and figures["in_time_bulk"] == 1.0
