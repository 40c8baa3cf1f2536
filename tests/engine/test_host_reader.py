"""Numbers of a step on their way from a device."""

import time

from afserve.engine.step.host_reader import Fetch


class Copied:
    def __init__(self, looks: float) -> None:
        self.looks = looks

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_copy_is_waited_for_until_it_is_done_or_the_time_is_over():
    soon, never = Copied(3), Copied(float("inf"))
    Fetch(soon).wait(60.0)  # type: ignore[arg-type]
    assert soon.looks == -1
    since = time.monotonic()
    Fetch(never).wait(0.01)  # type: ignore[arg-type]
    assert time.monotonic() - since >= 0.01
