"""What is coming: requests per second, and tokens per second of prompts and of answers. Numbers in, numbers out.

Pools work on tokens. Lengths change in time as rates do: a few minutes of long answers fill a decode pool at the same
rate of requests. So both kinds of tokens have a forecast of their own, beside that of requests and the mean lengths.
"""

from dataclasses import replace

from afserve.control.pilot.observed import MeanLengths, SeenWindow
from afserve.control.pilot.predict import Forecast, Windows
from afserve.control.pilot.sizes import Demand

_MOST = 2.0  # times the mean answer: who runs may also wait, as for a prompt's KV


class ComingDemand:
    def __init__(self, windows: Windows) -> None:
        self.rate, self.lengths = Forecast(windows), MeanLengths()
        self._read, self._made = Forecast(windows), Forecast(windows)  # tokens

    def note_window(self, at: float, window: SeenWindow, running: float) -> None:
        """What happened up to a moment, while so many requests decoded on average."""
        load = window.load
        self.rate.note_arrivals(at, window.seconds, load.came)
        self.lengths.note_window(window)
        self._read.note_arrivals(at, window.seconds, max(load.prompt_tokens - load.found_tokens, 0.0))
        if window.tpot:
            self._made.note_arrivals(at, window.seconds, running * window.seconds / window.tpot)

    def now(self) -> Demand:
        return self.lengths.demand(self.rate.present_rate)

    def within(self, seconds: float, deviations: float) -> Demand:
        """The most within so long from now, so many deviations above what is likely: of requests by their mean lengths,
        or of tokens, whichever is more."""
        rate = self.rate.soon(seconds, deviations)
        mean = self.lengths.demand(rate)
        if not rate:
            return mean
        read, made = (one.soon(seconds, deviations) / rate for one in (self._read, self._made))
        answer = max(mean.answer, min(made, _MOST * mean.answer))
        return replace(mean, computed=max(mean.computed, read), answer=answer)
