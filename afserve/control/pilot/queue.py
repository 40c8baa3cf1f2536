"""How long a prompt waits for a free reader, and how often that is too long. Formulas; seconds in, seconds out."""

import math

from afserve.control.pilot.sizes import TargetTimes


class QueueWait:
    """Of jobs that take `service` seconds on average on one of `servers`, which are busy for `share` of the time.
    `variation` is the squared coefficient of variation of a service.

    The chance to wait at all is Sakasegawa's for M/M/c (1977), as the planner's first token has it; a wait is taken as
    exponential, with the mean by Kingman's two moments. Servers that are busy all the time let nobody through.
    """

    def __init__(self, service: float, servers: int, share: float, variation: float) -> None:
        spread = (1 + variation) / 2
        self.chance = math.pow(min(share, 1.0), math.sqrt(2 * (servers + 1)) - 1)
        self._alone, self._share = service / servers * spread, share

    def _mean(self, ahead: float = 0.0, upto: float = 1.0) -> float:
        """Of those that wait, where the shares `ahead` and `upto` of all jobs come before them and with them (Cobham,
        1954, for jobs that are not interrupted)."""
        free = (1 - self._share * ahead) * (1 - self._share * upto)
        return self._alone / free if self._share * upto < 1 else math.inf

    @property
    def mean(self) -> float:
        return self.chance * self._mean()

    def longer(self, seconds: float, ahead: float = 0.0, upto: float = 1.0) -> float:
        """The share of such jobs that wait for longer than this."""
        mean = self._mean(ahead, upto)
        if seconds <= 0:
            return 1.0
        if not mean:
            return 0.0
        return self.chance * math.exp(-seconds / mean) if mean < math.inf else 1.0

    def late(self, wanted: TargetTimes, besides: float) -> float:
        """The largest share of first tokens, of all or of a class, that come too late; they take `besides` seconds
        without the wait."""
        shares = [self.longer(wanted.ttft - besides)] if math.isfinite(wanted.ttft) else [0.0]
        shares += [self.longer(one.ttft - besides, one.ahead, one.upto) for one in wanted.classes]
        return max(shares)
