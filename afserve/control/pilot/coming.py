"""What is coming: requests per second, and tokens per second of prompts and of answers. Numbers in, numbers out.

Pools work on tokens. Lengths change in time as rates do: a few minutes of long answers fill a decode pool at the same
rate of requests. So both kinds of tokens have a forecast of their own, beside that of requests and the mean lengths.
A jump is told by requests alone: one long prompt among few requests is chance. Prompts that may wait for long are
counted over longer than a minute: what comes in one of them is read in the next.
"""

from dataclasses import replace

from afserve.control.pilot.observed import MeanLengths, SeenWindow
from afserve.control.pilot.predict import Forecast, Windows
from afserve.control.pilot.sizes import Demand

_LONGER = 2.0  # times the mean lengths at most: who runs may also wait, or have come at a higher rate before
# Requests over which lengths are averaged: those of a trend's time, but no fewer; of more than so many that part of it.
_FEW, _MANY, _PART = 50.0, 2000.0, 1 / 6


class ComingDemand:
    def __init__(self, windows: Windows, waits: float = 0.0) -> None:
        """waits: seconds that a first token may take. `counted` are those over which prompts are counted."""
        self.rate, self.lengths = Forecast(windows), MeanLengths()
        slow = windows.for_waits(waits)
        self.counted = slow.short
        self._read, self._made = (Forecast(one, self.rate.jumps) for one in (slow, windows))  # tokens
        self._prompts = None if slow == windows else Forecast(slow, self.rate.jumps)  # requests
        self._tpot = 0.0  # the last one that was seen

    def note_window(self, at: float, window: SeenWindow, running: float) -> None:
        """What happened up to a moment, while so many requests decoded on average."""
        load = window.load
        for requests in filter(None, (self.rate, self._prompts)):
            requests.note_arrivals(at, window.seconds, load.came)
        came = self.rate.noted
        self.lengths.memory = min(max(came, _FEW), max(_PART * came, _MANY))
        self.lengths.note_window(window)
        self._read.note_arrivals(at, window.seconds, max(load.prompt_tokens - load.found_tokens, 0.0))
        self._tpot = window.tpot or self._tpot
        if self._tpot or not running:
            made = running * window.seconds / self._tpot if running else 0.0
            self._made.note_arrivals(at, window.seconds, made)

    @property
    def answer_seconds(self) -> float:
        """That an answer takes, behind its first token."""
        return self.lengths.answer * self._tpot

    def now(self) -> Demand:
        return self.lengths.demand(self.rate.present_rate)

    def within(self, seconds: float, deviations: float) -> Demand:
        """The most within so long from now, so many deviations above what is likely: of requests by their mean lengths,
        or of tokens, whichever is more."""
        rate = self.rate.soon(seconds, deviations)
        mean = self.lengths.demand(rate)
        if not rate:
            return mean
        prompts = self._prompts.soon(seconds, deviations) / rate if self._prompts else 1.0
        kinds = (prompts * mean.computed, self._read), (mean.answer, self._made)
        computed, answer = (
            min(max(usual, tokens.soon(seconds, deviations) / rate), _LONGER * usual)
            for usual, tokens in kinds
        )
        return replace(mean, prompt=max(mean.prompt, computed), computed=computed, answer=answer)
