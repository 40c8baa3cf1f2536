"""How long a prompt waits for a free reader, and how often that is too long. Formulas; seconds in, seconds out."""

import math


class QueueWait:
    """Of jobs that take `service` seconds on average on one of `servers`, which are busy for `share` of the time.
    `variation` is the squared coefficient of variation of a service.

    The chance to wait at all is Sakasegawa's for M/M/c (1977), as the planner's first token has it; a wait is taken as
    exponential, with the mean by Kingman's two moments. Servers that are busy all the time let nobody through.
    """

    def __init__(self, service: float, servers: int, share: float, variation: float) -> None:
        spread = (1 + variation) / 2
        self.chance = math.pow(min(share, 1.0), math.sqrt(2 * (servers + 1)) - 1)
        self._mean = service / servers / (1 - share) * spread if share < 1 else math.inf

    @property
    def mean(self) -> float:
        return self.chance * self._mean

    def longer(self, seconds: float) -> float:
        """The share of jobs that wait for longer than this."""
        if seconds <= 0:
            return 1.0
        if not self._mean:
            return 0.0
        return self.chance * math.exp(-seconds / self._mean) if self._mean < math.inf else 1.0
