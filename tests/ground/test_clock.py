"""The clock that skips pauses, and values as messages quote them."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import AwakeClock, FakeClock
from afserve.errors import shown


def test_a_pause_counts_for_one_gap() -> None:
    real = FakeClock()
    awake = AwakeClock(most=1.0, clock=real)
    for _ in range(10):
        real.advance(0.5)
        awake.now()
    assert awake.now() == 5.0
    real.advance(60.0)
    assert awake.now() == 6.0


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_it_never_goes_back_and_never_runs_ahead(gaps: list[float]) -> None:
    real = FakeClock()
    awake = AwakeClock(most=0.25, clock=real)
    last = awake.now()
    for gap in gaps:
        real.advance(gap)
        now = awake.now()
        assert -1e-6 <= now - last <= min(gap, 0.25) + 1e-6
        last = now


@given(st.one_of(st.integers(), st.floats(), st.text(), st.just(10**5000), st.lists(st.text(), max_size=50)))
def test_a_quoted_value_is_short(value: object) -> None:
    assert len(shown(value)) < 1000


def test_an_integer_of_thousands_of_digits_can_be_quoted() -> None:
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown(-7) == "-7"
