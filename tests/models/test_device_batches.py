"""A step's integers on the devices of a node: copied once per step and device. Here the other one is `meta`, which has
shapes and no numbers."""

from types import SimpleNamespace

import torch

from afserve.kernels.paged import HeldStates, PagedBatch
from afserve.models.devices.batches import BatchCopies

HERE, THERE = (
    SimpleNamespace(device=torch.device(name), bind_batch=lambda batch: batch) for name in ("cpu", "meta")
)


def batch_of(tokens):
    column = torch.arange(tokens)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    return PagedBatch(
        column,
        column,
        ends,
        ends[1:],
        ends[None, 1:],
        tokens,
        tokens,
        (0, tokens),
        (tokens,),
        HeldStates((0,)),
    )


def test_a_batch_is_copied_once_for_each_step_and_device():
    copies, one, other = BatchCopies(), batch_of(3), batch_of(5)
    assert copies.batch_on(HERE, one) is one, "no copy where it is"
    there = copies.batch_on(THERE, one)
    tensors = there.position_T, there.kv_slot_T, there.query_start_S1, there.context_S, there.block_table_SB
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (there.tokens, there.starts, there.contexts, there.max_query) == (3, (0, 3), (3,), 3)
    assert there.held is None and one.held is not None, "layers that keep states are not there"
    assert there.chosen is not one.chosen, "rows that an indexer chose are of one device"
    assert copies.batch_on(THERE, other).tokens == 5 and copies.batch_on(THERE, one) is there


def test_old_steps_are_forgotten():
    copies, first = BatchCopies(), batch_of(1)
    before = copies.batch_on(THERE, first)
    for tokens in range(2, 40):
        copies.batch_on(THERE, batch_of(tokens))
    assert copies.batch_on(THERE, first) is not before
