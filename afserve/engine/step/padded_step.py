"""A decode step in memory that stays, of a size that is rounded up: what is launched once over it is launched alike for
every step of that size.

Rows behind a step's own repeat its first row: they write the same key and value to the same place, and the same state,
since all states are read before one is written. Shapes: T rows of the size, B blocks of a table.
"""

from collections.abc import Iterator
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from afserve.engine.step.step_input import StepInput
from afserve.kernels.paged import PagedBatch

_SHORTEST = 256  # tokens: contexts up to it are one size
_EVEN = 8  # rows: from here on sizes are multiples of it
_NARROWEST = 64  # blocks: so are tables up to it


class NotRecordable(Exception):
    """Somebody wants to know on the host what differs from step to step."""


class StepSize(NamedTuple):
    """`widths` are those of the block tables, group by group."""

    rows: int
    context: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, step: StepInput, most_rows: int) -> "StepSize":
        groups, rows = (step.paged, *step.further), step.tokens
        return cls(
            min(most_rows, _above(rows) if rows < _EVEN else -(-rows // _EVEN) * _EVEN),
            max(_SHORTEST, _above(step.paged.max_context)),
            tuple(max(_NARROWEST, _above(paged.block_table_SB.shape[1])) for paged in groups),
        )


class Unsaid(tuple[int, ...]):
    """In the place of numbers that no recorded step may depend on."""

    def __iter__(self) -> Iterator[int]:
        raise NotRecordable("a layer reads contexts on the host")

    def __bool__(self) -> bool:
        raise NotRecordable("a layer reads contexts on the host")

    def __len__(self) -> int:
        raise NotRecordable("a layer reads contexts on the host")

    def __getitem__(self, at: SupportsIndex | slice) -> int:  # type: ignore[override]
        raise NotRecordable("a layer reads contexts on the host")


class PaddedStep:
    """`step` is the one that is computed; `fill` makes it another one."""

    def __init__(self, size: StepSize, device: torch.device) -> None:
        rows = size.rows
        self._token_T, self._position_T = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in "tp")
        self._context_T = torch.zeros(rows, dtype=torch.int32, device=device)
        start_T1 = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._groups = [
            PagedBatch(
                self._position_T,
                torch.zeros(rows, dtype=torch.int64, device=device),
                start_T1,
                self._context_T,
                torch.zeros((rows, width), dtype=torch.int32, device=device),
                max_query=1,
                max_context=size.context,
                starts=tuple(range(rows + 1)),
                contexts=Unsaid(),
            )
            for width in size.widths
        ]
        every = list(range(rows))
        self.step = StepInput(
            self._token_T,
            self._groups[0],
            start_T1[:-1].long(),
            every,
            [row + 1 for row in every],
            all_rows=True,
            decodes=rows,
            alone=False,
            shared=None,
            further=tuple(self._groups[1:]),
        )

    def fill(self, step: StepInput) -> None:
        """Copies on the device, in its current queue."""
        _spread(step.token_T, self._token_T)
        _spread(step.paged.position_T, self._position_T)
        _spread(step.paged.context_S, self._context_T)
        for mine, its in zip(self._groups, (step.paged, *step.further), strict=True):
            _spread(its.kv_slot_T, mine.kv_slot_T)
            _spread(its.block_table_SB, mine.block_table_SB[:, : its.block_table_SB.shape[1]])


def _spread(values: Tensor, into: Tensor) -> None:
    """The first one also where there is none."""
    into[: len(values)] = values
    into[len(values) :] = values[:1]


def _above(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
