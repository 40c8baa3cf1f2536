"""The reference off the CPU: no op waits for the device, experts without a loop over ids come to the same."""

import pytest
import torch

from afserve.kernels import reference_routed
from afserve.kernels.packed import ExpertShape
from afserve.kernels.paged import PagedBatch, sequences
from afserve.kernels.reference import Reference
from afserve.kernels.reference_routed import sums_by_choice, sums_by_slot
from tests.kernels.steps import AT_LOAD, META, Called, Decode, NoReadBack, empty, every_op, meta_batch


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 70])
def test_every_op_runs_without_a_value_to_read(queries: int) -> None:
    ops = Called(Reference(META), META)
    with NoReadBack():
        every_op(ops, meta_batch(3, queries, 200), fp8=False)
    assert ops.left_out() <= AT_LOAD, "an op that this test does not know"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "v2-groups", "qwen3", "mixtral-window"])
def test_a_models_decode_step_runs_without_a_value_to_read(tiny_checkpoint, name: str) -> None:
    step = Decode(tiny_checkpoint(name), Reference(META), META)
    assert step().shape == (3, step.spec.vocab_size)


def test_meta_tensors_catch_what_reads_a_value() -> None:
    """So the tests above have teeth: a batch whose integers are on the device only, and the loop over slots."""
    batch = meta_batch(3, 1, 40)
    bare = PagedBatch(
        batch.position_T, batch.kv_slot_T, batch.query_start_S1, batch.context_S, batch.block_table_SB, 1, 40
    )
    with pytest.raises((NotImplementedError, RuntimeError)):
        sequences(bare, 16)
    experts = Reference(META).empty_experts(ExpertShape(2, 8, 4, torch.bfloat16))
    with pytest.raises((NotImplementedError, RuntimeError)):
        sums_by_slot(empty(2, 8), empty(2, 1, dtype=torch.int32), empty(2, 1), experts, empty(2, 8))


def test_host_integers_and_tensors_describe_the_same_sequences() -> None:
    starts, contexts = torch.tensor([0, 1, 4]).int(), torch.tensor([9, 17]).int()
    table = torch.tensor([[0, 1, 1], [2, 3, 0]]).int()
    tensors = torch.zeros(4).long(), torch.zeros(4).long(), starts, contexts, table, 3, 17
    told = sequences(PagedBatch(*tensors, (0, 1, 4), (9, 17)), 8)
    read = sequences(PagedBatch(*tensors), 8)
    assert [s[:3] for s in told] == [s[:3] for s in read] == [(0, 1, 9), (1, 4, 17)]
    assert [s[3].tolist() for s in told] == [s[3].tolist() for s in read] == [[0, 1], [2, 3, 0]]


@pytest.mark.parametrize("gathered", [1, 5000, 1 << 20])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_experts_by_choice_are_experts_by_slot(
    monkeypatch: pytest.MonkeyPatch, rows: int, gathered: int
) -> None:
    monkeypatch.setattr(reference_routed, "GATHERED", gathered)
    torch.manual_seed(rows)
    backend, (slots, hidden, inner) = Reference(), (4, 20, 12)
    experts = backend.empty_experts(ExpertShape(slots, hidden, inner, torch.float64))
    for slot in range(slots):
        backend.set_expert(experts, slot, torch.randn(2 * inner, hidden), torch.randn(hidden, inner))
    x, weight = torch.randn(rows, hidden, dtype=torch.float64), torch.rand(rows, 3)
    slot = torch.randint(-1, slots, (rows, 3)).int()
    start = torch.randn(rows, hidden)
    totals = [start.clone(), start.clone()]
    sums_by_slot(x, slot, weight, experts, totals[0])
    sums_by_choice(x, slot, weight, experts, totals[1])
    torch.testing.assert_close(*totals, atol=1e-5, rtol=1e-5)


def test_a_skipped_slot_adds_nothing_whatever_the_weights_are() -> None:
    backend = Reference()
    experts = backend.empty_experts(ExpertShape(2, 4, 4, torch.float32))
    backend.set_expert(experts, 0, torch.full((8, 4), torch.nan), torch.ones(4, 4))
    backend.set_expert(experts, 1, torch.ones(8, 4), torch.ones(4, 4))
    slot, total = torch.tensor([[-1, 1], [-1, -1]]).int(), torch.zeros(2, 4)
    sums_by_choice(torch.ones(2, 4), slot, torch.ones(2, 2), experts, total)
    assert total.isfinite().all() and total[0].all() and not total[1].any()
