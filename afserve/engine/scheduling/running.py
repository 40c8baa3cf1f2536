"""The sequences that run, each in one micro-batch. It knows no blocks and no queue."""

from collections.abc import Iterator

from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import PROMPT, Chunk, StepPlan


class Running:
    """`by_batch` has the sequences of each micro-batch, in the order in which they came."""

    def __init__(self, micro_batches: int) -> None:
        self.by_batch: list[list[Sequence]] = [[] for _ in range(micro_batches)]
        self.undrawn: dict[int, Sequence] = {}  # by order, those that brought the row of their next token

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self.by_batch)

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self.by_batch:
            yield from sequences

    def enter(self, sequence: Sequence, micro_batch: int) -> None:
        sequence.micro_batch = micro_batch
        self.by_batch[micro_batch].append(sequence)
        if sequence.row:
            self.undrawn[sequence.order] = sequence

    def leave(self, sequence: Sequence) -> None:
        self.by_batch[sequence.micro_batch].remove(sequence)
        self.undrawn.pop(sequence.order, None)
        sequence.micro_batch = -1

    def even_out(self, micro_batch: int, active: int) -> None:
        """Hand sequences over until none of the first `active` micro-batches has two fewer; another one hands over
        all."""
        mine = self.by_batch[micro_batch]
        while mine:
            least = min(range(active), key=lambda index: len(self.by_batch[index]))
            if micro_batch < active and len(mine) < len(self.by_batch[least]) + 2:
                return
            sequence = mine.pop()
            sequence.micro_batch = least
            self.by_batch[least].append(sequence)

    def drawing(self, micro_batch: int) -> StepPlan | None:
        """Those whose next token can be drawn now, in flight from then on; the end of their prompts is computed in the
        step behind it."""
        mine = [sequence for sequence in self.undrawn.values() if sequence.micro_batch == micro_batch]
        for sequence in mine:
            sequence.in_flight = True
        chunks = tuple(Chunk(sequence, sequence.computed, 0, True, PROMPT) for sequence in mine)
        return StepPlan(micro_batch, chunks, draws=True) if chunks else None

    def drawn(self, sequence: Sequence) -> None:
        """Its next token was drawn from its row."""
        sequence.row = b""
        self.undrawn.pop(sequence.order, None)

    def youngest_behind(self, sequence: Sequence) -> Sequence | None:
        """The youngest one that is younger than this one and not in flight."""
        younger = [s for s in self if s.rank > sequence.rank and not s.in_flight]
        return max(younger, key=lambda s: s.rank, default=None)

    def others(self, micro_batch: int) -> Iterator[Sequence]:
        """Those of other micro-batches."""
        for index, sequences in enumerate(self.by_batch):
            if index != micro_batch:
                yield from sequences

    def check(self) -> None:
        undrawn = {sequence.order for sequence in self if sequence.row}
        assert undrawn == set(self.undrawn), "rows that wait to be drawn are miscounted"
