"""A step's integers on the devices of a node: copied once per step and device. Here the other one is `meta`, which has
shapes and no numbers."""

import gc
import weakref
from types import SimpleNamespace

import torch

from afserve.kernels.indexer import chosen_batch
from afserve.kernels.paged import HeldStates, PagedBatch
from afserve.models.devices.batches import batch_on, take_choice

HERE, THERE = (
    SimpleNamespace(device=torch.device(name), bind_batch=lambda batch: batch.with_handle(object()))
    for name in ("cpu", "meta")
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
    one, other = batch_of(3), batch_of(5)
    assert batch_on(HERE, 0, one) is one, "no copy where it is"
    there = batch_on(THERE, 1, one)
    tensors = there.position_T, there.kv_slot_T, there.query_start_S1, there.context_S, there.block_table_SB
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (there.tokens, there.starts, there.contexts, there.max_query) == (3, (0, 3), (3,), 3)
    assert there.held is None and one.held is not None, "layers that keep states are not there"
    assert batch_on(THERE, 1, other).tokens == 5 and batch_on(THERE, 1, one) is there
    assert batch_on(THERE, 1, one.with_handle(object())) is there, "the same step"
    assert batch_on(THERE, 2, one) is not there and batch_on(HERE, 3, one) is not one, "one for each device"


def test_copies_live_as_long_as_their_batch():
    """However many devices and micro-batches there are."""
    batches = [batch_of(tokens) for tokens in range(1, 40)]
    copies = [[batch_on(THERE, number, batch) for number in range(1, 8)] for batch in batches]
    for batch, own in zip(batches, copies, strict=True):
        assert all(batch_on(THERE, number, batch) is copy for number, copy in enumerate(own, 1))
    left = weakref.ref(copies[0][0].position_T)
    del batches, copies, batch, own
    gc.collect()
    assert left() is None


def test_the_rows_that_were_chosen_are_those_of_the_first_device():
    lead = batch_of(3)
    copy, slots = batch_on(THERE, 1, lead), torch.tensor([[0, 1], [1, 2], [0, 2]], dtype=torch.int32)
    lead.chosen.rows = chosen_batch(lead, slots, 2)
    take_choice(lead, copy)
    taken = copy.chosen.rows
    assert taken.block_table_SB.shape == (3, 2) and taken.block_table_SB.device.type == "meta"
    assert (taken.starts, taken.contexts, taken.max_query) == ((0, 1, 2, 3), (1, 2, 2), 1)
    take_choice(lead, copy)
    assert copy.chosen.rows is taken, "copied once for all layers that attend it"
    here = batch_on(HERE, 2, lead)
    here.chosen.rows = chosen_batch(here, slots.flip(1), 2)
    take_choice(lead, here)
    assert torch.equal(here.chosen.rows.block_table_SB, slots), "in the place of what it chose itself"
    lead.chosen.rows = None
    take_choice(lead, copy)
    assert copy.chosen.rows is None, "all that tokens see"
