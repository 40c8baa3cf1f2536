"""The integers of a step on the further devices of a node: copied once per step and device, not once per layer."""

from dataclasses import replace

import torch
from torch import Tensor

from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch, RotaryRows


def batch_on(ops: Ops, number: int, batch: PagedBatch) -> PagedBatch:
    """What device `number` of a node, whose kernels are `ops`, reads in place of `batch`, which is the first one's: for
    layers with heads, so nothing of it is held. It lives as long as `batch`."""
    if number == 0:
        return batch
    if number not in batch.copies:
        batch.copies[number] = ops.bind_batch(_copied(batch, ops.device))
    return batch.copies[number]


def take_choice(batch: PagedBatch, copy: PagedBatch) -> None:
    """`copy` attends what was chosen on the first device last: a layer that is whole on that one may have chosen it."""
    rows, device = batch.chosen.rows, copy.position_T.device
    if copy is batch or (rows is not None and copy.chosen.taken is rows):
        return
    copy.chosen.taken = rows
    copy.chosen.rows = None if rows is None else _copied(rows, device)


def _copied(batch: PagedBatch, device: torch.device) -> PagedBatch:
    def there(numbers: Tensor) -> Tensor:
        return numbers.to(device, non_blocking=True)

    return replace(
        batch,
        position_T=there(batch.position_T),
        kv_slot_T=there(batch.kv_slot_T),
        query_start_S1=there(batch.query_start_S1),
        context_S=there(batch.context_S),
        block_table_SB=there(batch.block_table_SB),
        held=None,
        turns=batch.turns and RotaryRows(*map(there, batch.turns)),
    )
