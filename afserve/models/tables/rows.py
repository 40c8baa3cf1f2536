"""Rows of a look-up table, read one by one where the checkpoint stores them.

Nothing of a table is copied into the process: the system's page cache keeps what was read lately, and rows that are
read together are asked of the disk together. Shapes: I rows, D numbers of one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming
from afserve.models.weights import TensorSource
from afserve.spec_parts import TableSpec


class TableRows:
    def __init__(self, table: TableSpec, source: TensorSource, naming: Naming) -> None:
        """Raises CheckpointError where the checkpoint has no such table."""
        self.table, self._source, self._naming = table, source, naming
        for head in range(table.heads):
            self._read(head, [0])

    def read(self, numbers: Sequence[int], heads: Sequence[int]) -> Tensor:
        """Float32, (I, D): rows of the whole table and the head that each is of. Each is read once, however often it is
        named."""
        starts, of_head = self.table.starts, dict[int, dict[int, int]]()
        for number, head in zip(numbers, heads, strict=True):
            rows = of_head.setdefault(head, {})
            rows.setdefault(number - starts[head], len(rows))
        read = {head: self._read(head, list(rows)) for head, rows in of_head.items()}
        first, firsts = 0, dict[int, int]()
        for head, part in read.items():
            firsts[head], first = first, first + len(part)
        places = [
            firsts[head] + of_head[head][number - starts[head]]
            for number, head in zip(numbers, heads, strict=True)
        ]
        return torch.cat(list(read.values()))[places]

    def _read(self, head: int, numbers: list[int]) -> Tensor:
        """Numbers within the head's own table."""
        starts = self.table.starts
        shape = starts[head + 1] - starts[head], self.table.width
        name = self._naming.table_rows(head)
        if not all(0 <= number < shape[0] for number in numbers):
            raise CheckpointError(f"{name}: rows {min(numbers)} to {max(numbers)}, it has {shape[0]:,}")
        return self._source.picked(name, shape, numbers, torch.float32)
