"""What a watcher knows of itself: how late its looks come, and the kernel's numbers, which are not read at each."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.control.host_watch import MOST_LATE, HostWatch
from afserve.control.membership.silence import HostLoad

EVERY = 0.25


@given(st.lists(st.floats(0.0, 1e4), max_size=20))
def test_late_is_what_a_look_came_after_its_time(gaps):
    clock = FakeClock(5.0)
    watch = HostWatch(EVERY, clock, lambda: None)
    assert watch() == HostLoad()
    for gap in gaps:
        before = clock.now()
        clock.advance(gap)
        late = watch().late
        assert 0.0 <= late <= MOST_LATE
        assert late == min(MOST_LATE, max(0.0, clock.now() - before - EVERY))


def test_the_kernel_is_asked_once_a_second():
    clock, asked = FakeClock(), []

    def pressure():
        asked.append(clock.now())
        return 0.5

    watch = HostWatch(EVERY, clock, pressure)
    for _ in range(40):
        assert watch().pressure == 0.5
        clock.advance(EVERY)
    assert len(asked) == 10
