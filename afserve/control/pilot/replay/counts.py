"""What arrives in a replay, and sums over it as gateways and nodes count them."""

from dataclasses import dataclass

from afserve.control.pilot.observed import PoolLoad
from afserve.control.pilot.sizes import TargetTimes


@dataclass(frozen=True, slots=True)
class Packet:
    """Seconds of arrival; tokens of prompt and answer of each of `weight` requests."""

    at: float
    prompt: int
    answer: int
    weight: float = 1.0


@dataclass(slots=True)
class PacketCounts:
    """Sums since the beginning, over requests: what gateways and nodes count too."""

    came: float = 0.0
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0
    read: float = 0.0  # first tokens
    read_seconds: float = 0.0
    read_late: float = 0.0
    ended: float = 0.0
    answer_tokens: float = 0.0
    decode_seconds: float = 0.0  # from a first token to the last
    decode_late: float = 0.0
    met: float = 0.0  # in time in both
    tokens: float = 0.0  # generated
    reader_seconds: float = 0.0  # busy, by readers

    def note_came(self, one: Packet) -> None:
        self.came += one.weight
        self.prompt_tokens += one.prompt * one.weight
        self.prompt_squares += one.prompt * one.prompt * one.weight

    def note_first(self, one: Packet, first: float, wanted: TargetTimes) -> None:
        """Its first token came at that second."""
        seconds = first - one.at
        self.read += one.weight
        self.read_seconds += seconds * one.weight
        self.tokens += one.weight
        if seconds > wanted.ttft:
            self.read_late += one.weight

    def note_ended(self, one: Packet, first: float, ended: float, wanted: TargetTimes) -> None:
        self.ended += one.weight
        self.answer_tokens += one.answer * one.weight
        self.decode_seconds += (ended - first) * one.weight
        late = ended - first > wanted.tpot * max(one.answer - 1, 1)
        self.decode_late += one.weight * late
        if not late and first - one.at <= wanted.ttft:
            self.met += one.weight

    def load(self) -> PoolLoad:
        return PoolLoad(
            came=self.came,
            prompt_tokens=self.prompt_tokens,
            prompt_squares=self.prompt_squares,
            first=self.read,
            first_seconds=self.read_seconds,
            first_late=self.read_late,
            ended=self.ended,
            answer_tokens=self.answer_tokens,
            rest_tokens=self.answer_tokens - self.ended,
            rest_seconds=self.decode_seconds,
            rest_late=self.decode_late,
            prefill_busy=self.reader_seconds,
        )
