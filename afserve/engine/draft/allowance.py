"""Seconds that may be lost: an account of what pays, and of finding out whether it does. Values in, values out.

A small share of the time that passes comes in, and whatever was won; what was lost goes out. So what pays never waits,
and what does not is tried as often as that share lets it: with 1 % of steps that take 10 ms, what loses 1 ms in vain is
tried in one step of ten. It never costs more than that share, and what is kept in the account.
"""

from afserve.engine.stats import smoothed

_LATELY = 0.1  # weight of the newest value
_UNUSUAL = 4.0  # times as long as lately: something else was in it


class Allowance:
    """Full at first."""

    def __init__(self, share: float) -> None:
        self.share = share  # of the time that passes
        self.saved = self.most = 0.0  # seconds, and as many as are kept

    def pass_time(self, seconds: float, most: float, won: float = 0.0) -> None:
        """`won` is below 0 where it was lost."""
        saved = most if self.full else self.saved
        self.most = most
        self.saved = min(saved + self.share * seconds + won, most)

    @property
    def full(self) -> bool:
        return self.saved >= self.most

    def spend(self, seconds: float) -> None:
        self.saved -= seconds


class Usual:
    """What something takes, lately."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, seconds: float) -> float:
        """As long as it took; less where it was unusual."""
        taken = min(seconds, _UNUSUAL * self.seconds) if self.seconds else seconds
        self.seconds = smoothed(self.seconds, taken, _LATELY)
        return taken
