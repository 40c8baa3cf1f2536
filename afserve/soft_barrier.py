"""How long an expert node holds a layer's rows for the other attention nodes: numbers in, a time out.

A stream is one micro-batch of one attention node. It is waited for only while it is expected: it was answered for the
layer before, and its usual time until the next dispatch is not over. A slow, idle or dead node is thus never waited
for, and no hold is longer than what merging can save, one call. It knows no tensors and no clock.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass

_WEIGHT = 0.125  # of the newest sample in a running mean


@dataclass(slots=True)
class _Stream:
    """Times in seconds. `gap` is the usual time from an answer to the next dispatch, `spread` its mean deviation."""

    node: int
    layer: int
    answered: float | None = None
    gap: float | None = None
    spread: float = 0.0

    def learn(self, gap: float) -> None:
        if self.gap is None:
            self.gap = gap
            return
        self.spread += _WEIGHT * (abs(gap - self.gap) - self.spread)
        self.gap += _WEIGHT * (gap - self.gap)

    def expected_by(self) -> float | None:
        """When its next dispatch should be here; None while that cannot be told."""
        if self.answered is None or self.gap is None:
            return None
        return self.answered + self.gap + 2 * self.spread


class SoftBarrier:
    """`longest` bounds every hold, in seconds; 0 turns holding off. `layers` is the number of MoE layers."""

    def __init__(self, layers: int, longest: float = 0.001) -> None:
        self._layers = layers
        self._longest = longest
        self._streams: dict[Hashable, _Stream] = {}
        self._call: float | None = None

    @property
    def limit(self) -> float:
        """The longest hold that can pay off: what one more call would cost."""
        return 0.0 if self._call is None else min(self._longest, self._call)

    def arrived(self, stream: Hashable, node: int, layer: int, now: float) -> None:
        """A dispatch of `stream`, which belongs to attention node `node`, is here."""
        known = self._streams.setdefault(stream, _Stream(node, layer))
        if known.answered is not None and layer == (known.layer + 1) % self._layers:
            known.learn(now - known.answered)
        known.layer, known.answered = layer, None

    def note_call(self, streams: Collection[Hashable], now: float, seconds: float) -> None:
        """One call that took `seconds` answered all of `streams`."""
        if self._call is None:
            self._call = seconds
        self._call += _WEIGHT * (seconds - self._call)
        for stream in streams:
            if stream in self._streams:
                self._streams[stream].answered = now

    def passed(self, stream: Hashable, node: int, layer: int, now: float, seconds: float) -> None:
        """Dispatches of `stream` came and were answered of which nobody told; the last one, of `layer`, just now, by a
        call that took `seconds`."""
        known = self._streams.setdefault(stream, _Stream(node, layer))
        known.layer, known.answered = layer, None
        self.note_call((stream,), now, seconds)

    @property
    def nodes(self) -> int:
        """How many nodes dispatches came from, those that are gone not counted."""
        return len({stream.node for stream in self._streams.values()})

    def next_in(self, now: float, besides: Collection[int]) -> float | None:
        """Seconds until the next dispatch is usually here, of streams whose nodes are not `besides`; None where none is
        expected."""
        usual = [
            max(0.0, stream.answered + stream.gap - now)
            for stream in self._streams.values()
            if stream.node not in besides
            and stream.answered is not None
            and stream.gap is not None
            and stream.answered + stream.gap + 2 * stream.spread > now
        ]
        return min(usual, default=None)

    def usual_gap(self, besides: Collection[int]) -> float | None:
        """The least usual time from an answer to the next dispatch, in seconds, of streams whose nodes are not
        `besides`; None where none is known."""
        gaps = [
            stream.gap
            for stream in self._streams.values()
            if stream.node not in besides and stream.gap is not None
        ]
        return min(gaps, default=None)

    def forget(self, node: int) -> None:
        """An attention node is gone."""
        self._streams = {key: stream for key, stream in self._streams.items() if stream.node != node}

    def call_time(self, layer: int, nodes: Collection[int], since: float, now: float) -> float:
        """When to compute `layer`'s rows, of which the first came at `since` and which `nodes` have sent.

        A time that is not after `now` means at once.
        """
        latest = since + self.limit
        if latest <= now:
            return now
        waited_for = [
            by
            for stream in self._streams.values()
            if stream.node not in nodes
            and (stream.layer + 1) % self._layers == layer
            and (by := stream.expected_by()) is not None
            and now < by <= latest
        ]
        return max(waited_for, default=now)
