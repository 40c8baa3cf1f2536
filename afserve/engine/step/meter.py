"""What an attention node measures about its pipeline: time it computes, parks, and has rows under way.

Two clock readings per resume and per dispatch, so it is always on; with a `Trace` it also draws. The same numbers
are metrics and what `afserve bench pipeline` prints.
"""

from collections.abc import Sequence

from afserve.clock import Clock
from afserve.comm.m2n.link_contract import SentTicket
from afserve.comm.m2n.port import Arrival
from afserve.comm.transport import Box
from afserve.engine.stats import smoothed
from afserve.tracing.trace import AWAY, EXPERTS, NO_ARGS, PICTURES, WAITING, Args, Arrow, Slice, Trace

_WEIGHT = 0.2  # of the newest step in a rate
_LONG = 64  # tokens of a step from which on it says how fast prompts are, and not how long a step is at least


class Meter:
    """Seconds since the start: `busy` computing, of which `encoding` pictures, `parked` only waiting, `under_way`
    summed over dispatches."""

    def __init__(self, clock: Clock, trace: Trace | None = None) -> None:
        self.now = clock.now
        self.trace = trace  # may change while it runs
        self._sent: dict[int, tuple[float, int, SentTicket]] = {}
        self.busy = self.encoding = 0.0
        self.pictures = 0  # tiles that were encoded
        self.parked = 0.0
        self.under_way = 0.0
        self.dispatches = 0
        self.prefill_rate = 0.0  # tokens of prompts per second of a step's time; 0 until there was one
        self.prompt_rate = 0.0  # the same of long steps only

    def ran(self, micro_batch: int, since: float) -> None:
        """A micro-batch computed from `since` until now."""
        now = self.now()
        self.busy += now - since
        if self.trace is not None:
            self.trace.slice(track(micro_batch), "attend", since, now)

    def encoded(self, since: float, *, whole: bool) -> float:
        """A part of a tile of a picture was, from `since` until what is returned; `whole`: the last part."""
        now = self.now()
        self.busy += now - since
        self.encoding += now - since
        self.pictures += whole
        if self.trace is not None:
            self.trace.slice(PICTURES, "encode", since, now)
        return now

    def slept(self, since: float) -> None:
        now = self.now()
        self.parked += now - since
        if self.trace is not None:
            self.trace.slice(WAITING, "wait", since, now)

    def prefilled(self, tokens: int, since: float) -> None:
        """A step that was mostly prompts began at `since`, and is over."""
        if (seconds := self.now() - since) > 0:
            self.prefill_rate = smoothed(self.prefill_rate, tokens / seconds, _WEIGHT)
            if tokens >= _LONG:
                self.prompt_rate = smoothed(self.prompt_rate, tokens / seconds, _WEIGHT)

    def drew(self, row: str, what: str, seconds: float) -> None:
        """Something beside the micro-batches that took so long, on a row of its own. Whoever says it may have measured
        by another clock, such as one that skips pauses."""
        if self.trace is not None:
            now = self.now()
            self.trace.slice(row, what, now - seconds, now)

    def drew_arrow(self, row: str, identity: str, step: Arrow) -> None:
        """One end of an arrow from another node to this one or back."""
        if self.trace is not None:
            self.trace.arrow(identity, step, row, self.now())

    def did(self, micro_batch: int, what: str, since: float, args: Args = NO_ARGS) -> None:
        """A part of what `ran` will draw, such as scheduling or sampling, with `args` beside it."""
        if self.trace is not None:
            self.trace.slice(track(micro_batch), what, since, self.now(), args)

    def sent(self, micro_batch: int, layer: int, ticket: SentTicket, since: float) -> None:
        """Rows left for the expert nodes; `since` is from before the first was on its way, as nobody got it earlier."""
        self._sent[micro_batch] = (since, layer, ticket)
        self.dispatches += 1
        if self.trace is not None:
            for identity in arrows(ticket):
                self.trace.arrow(identity, "s", track(micro_batch), since)

    def back(self, micro_batch: int) -> None:
        """Their partial sums are about to be added."""
        now = self.now()
        since, layer, ticket = self._sent.pop(micro_batch)
        self.under_way += now - since
        if self.trace is not None:
            self.trace.slice(*self._away(micro_batch, since, layer, ticket, now))
            for identity in arrows(ticket):
                self.trace.arrow(identity, "f", track(micro_batch), now)

    def computed(self, dispatches: int, seconds: float, waited: float) -> None:
        """The experts took so long for all layers of a step, which nothing was drawn of. For `waited` of it `ran` will
        take waiting for computing."""
        self.dispatches += dispatches
        self.under_way += seconds
        self.parked += waited
        self.busy -= waited

    def open(self) -> list[Slice]:
        """Rows that are with the experts now, as `back` would draw them."""
        now = self.now()
        return [self._away(index, *sent, now) for index, sent in self._sent.items()]

    @staticmethod
    def _away(micro_batch: int, since: float, layer: int, ticket: SentTicket, now: float) -> Slice:
        args: Args = {"layer": layer, "messages": arrows(ticket)}
        return f"{track(micro_batch)}{AWAY}", f"layer {layer}", since, now, args


class ExpertWatch:
    """Draws an expert node's computations; called by the node after each."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __call__(
        self, layer: int, group: Sequence[Arrival], start: float, end: float, prompt_rows: int | None = None
    ) -> None:
        """`prompt_rows`: of a piece of prompts, how many were computed with it; 0 where only some experts were."""
        whole = sum(arrival.header.rows for arrival in group)
        rows = whole if prompt_rows is None else prompt_rows
        messages = [arrow(arrival.box, arrival.header.sequence) for arrival in group]
        args: Args = {"layer": layer, "rows": rows, "messages": messages}
        what = f"{rows} rows of {len(group)}"
        if prompt_rows is not None:
            what = (
                f"{rows} of {whole} rows of prompts" if rows else f"some experts of {whole} rows of prompts"
            )
        self._trace.slice(EXPERTS, f"layer {layer}: {what}", start, end, args)
        for identity in messages:
            self._trace.arrow(identity, "t", EXPERTS, start)


def track(micro_batch: int) -> str:
    return f"micro-batch {micro_batch}"


def arrow(box: Box, sequence: int) -> str:
    return f"{box.attention}.{box.expert}.{box.micro_batch}.{sequence}"


def arrows(ticket: SentTicket) -> list[str]:
    """One per message of a dispatch; none when the experts are in this process."""
    return [arrow(part.box, part.header.sequence) for part in ticket.parts]
