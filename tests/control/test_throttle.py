"""Thinking beside serving: it pauses between steps, and it thinks the same."""

import numpy as np
import pytest

from afserve.control.membership import balancing as breath
from afserve.control.membership.balancing import Throttle
from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import Nodes, Problem, scenarios


class Hands:
    """A thread's clock that is wound by hand, and the pauses it was given."""

    def __init__(self) -> None:
        self.used, self.pauses = 0.0, 0

    def thread_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.pauses += 1


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(breath, "time", hands)
    return hands


def test_it_pauses_once_per_millisecond_of_work(hands: Hands) -> None:
    throttle = Throttle()
    for _ in range(100):
        hands.used += 2.0**-12
        throttle()
    assert hands.pauses == 20


def test_another_thread_begins_anew(hands: Hands) -> None:
    throttle = Throttle()
    hands.used = 5.0
    throttle()
    hands.used = 0.1
    throttle()
    hands.used = 0.1005
    throttle()
    assert hands.pauses == 2


@pytest.mark.slow
@pytest.mark.parametrize("slots", [16, 20])
def test_a_search_breathes_and_finds_the_same(slots: int) -> None:
    rng = np.random.default_rng(0)
    old, new = rng.lognormal(0, 1, (2, 3, 16))
    nodes = Nodes.even(4, slots)
    asked = Problem(
        scenarios(new), nodes, current=balance(Problem(scenarios(old), nodes)).placement(), moves=9
    )
    breaths: list[None] = []
    with_breath = balance(asked, lambda: breaths.append(None))
    assert with_breath.placement() == balance(asked).placement()
    assert len(breaths) > 10
