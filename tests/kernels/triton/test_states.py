"""States that Triton's kernels move, by single tokens and prompts, and the row steps around them, against PyTorch's."""

from dataclasses import replace

import pytest
import torch

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import DeltaRows, DeltaShape, delta_rows
from afserve.kernels.reference import Reference
from afserve.kernels.row_steps import RowSteps
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.launch import PreparedLaunch
from afserve.kernels.triton.row_steps import TritonRowSteps
from afserve.kernels.triton.states import move_rows
from tests.kernels.test_delta import BLOCK, RULES, batch_of, layer_of, rows_of, shape_of

# At the beginning, within a block, at the end of one, behind it; the last rows are those of a padded step.
PLACES = ((0, 1, [3]), (5, 6, [1]), (7, 8, [2]), (8, 9, [4, 5]), (19, 20, [7, 8, 9]))
NORM = Reference(torch.device("cpu")).rms_norm


@RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_tokens_move_states_as_pytorch_does(rule, dtype, device, close):
    shape, places = shape_of(rule), [(at, end, blocks) for at, end, blocks in PLACES]
    layer, rows, batch = layer_of(shape=shape), rows_of(len(places), 3, dtype, shape), batch_of(places)
    kept = StateShape(shape.numbers)
    cache = torch.randn(
        10, BLOCK, kept.width(BLOCK, torch.float32), generator=torch.Generator().manual_seed(1)
    )
    own, truth = kept.of_blocks(cache.to(device, copy=True)), kept.of_blocks(cache.clone())
    wanted = delta_rows(rows, layer, truth, BLOCK, batch)
    there, on = layer_on(layer, device), rows_on(rows, device)
    where = batch.block_table_SB.to(device), batch.position_T.to(device), BLOCK
    close(move_rows(on, there, own, *where), wanted, 64)
    close(own, truth, 64)


def test_rows_that_repeat_the_first_one_move_no_state(device):
    """As those behind a recorded step's own do: a state is moved once, and the rows of others are what they were."""
    shape = shape_of("head")
    layer, rows = layer_of(shape=shape), rows_of(2, 3, shape=shape)
    kept = StateShape(shape.numbers)
    cache = torch.randn(
        6, BLOCK, kept.width(BLOCK, torch.float32), generator=torch.Generator().manual_seed(1)
    )
    found = []
    for repeats in (0, 3):
        state_NF, row_T = kept.of_blocks(cache.to(device, copy=True)), [0, 1] + [0] * repeats
        batch = batch_of([((9, 10, [1, 2]), (4, 5, [3]))[row] for row in row_T])
        on, there = rows_on(rows.of(torch.tensor(row_T)), device), layer_on(layer, device)
        where = batch.block_table_SB.to(device), batch.position_T.to(device), BLOCK
        found.append((move_rows(on, there, state_NF, *where)[:2], state_NF.clone()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_rows_are_pytorchs(dtype, device, close):
    """Rows are parts of wider ones, as projections leave them."""
    g = torch.Generator().manual_seed(2)
    own, truth = TritonRowSteps(), RowSteps()
    heads, size = 3, 20
    wide = (torch.randn(5, 150, generator=g) * 6).to(dtype)
    forget, share, gate = wide[:, 1:4], wide[:, 70:73], wide[:, 80:140]
    step, rate = torch.randn(3, generator=g), -torch.rand(3, generator=g)
    read, norm = torch.randn(5, heads, size, generator=g), torch.rand(60, generator=g).to(dtype)

    def both(name, *given, **how):
        made = getattr(own, name)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in given), **how)
        right = getattr(truth, name)(*given, **how)
        for one, wanted in zip(*((x if isinstance(x, tuple) else (x,)) for x in (made, right)), strict=True):
            assert one.dtype is wanted.dtype
            close(one, wanted, 4)

    for replaced, floor in ((share, None), (None, None), (share, -5.0)):
        both("forget_rows", forget, replaced, step, rate, floor)
    for silu in (False, True):
        both("gate_heads", NORM, read, norm[:size], 1e-5, gate, silu=silu)
    for groups in (1, 2):
        both("norm_gated", NORM, read, norm, 1e-5, gate, groups)
    x = torch.randn(5, heads, size, generator=g).to(dtype)
    for opening in (gate, share):
        for softplus in (False, True):
            both("open_rows", x, opening, softplus=softplus)


def test_the_least_softplus_is_no_zero(device):
    """A rate of forgetting of 1e-9 is one."""
    forget = torch.full((1, 2), -21.0)
    decay, _ = TritonRowSteps().forget_rows(
        forget.to(device), None, torch.zeros(2, device=device), torch.ones(2, device=device), None
    )
    torch.testing.assert_close(decay.cpu(), torch.nn.functional.softplus(forget), rtol=1e-5, atol=0.0)


CUTS = {  # (first, end) of each sequence in one step after the other; tokens of a block, and the rows' dtype
    "one": ([[(0, 1)], [(1, 64)], [(64, 128)], [(128, 193)], [(193, 393)]], 272, torch.float32),
    "several": ([[(0, 200), (0, 63), (0, 2)], [(200, 201), (63, 128), (2, 67)]], 96, torch.bfloat16),
    "short": ([[(0, 15), (0, 33)], [(15, 17), (33, 49)], [(17, 40), (49, 50)]], 16, torch.bfloat16),
    "tiny": ([[(0, 1), (0, 5)], [(1, 3), (5, 12)]], 2, torch.float32),
}


@pytest.mark.by_day(1)
@RULES
@pytest.mark.parametrize("cut", CUTS)
def test_prompts_move_states_as_pytorch_does(rule, cut, device, close):
    """Lengths around those of chunks, from the beginning and from a state, in steps one after the other."""
    steps, block, dtype = CUTS[cut]
    shape, roundings = shape_of(rule), 64 if dtype is torch.float32 else 4
    layer, kept = layer_of(shape=shape), StateShape(shape.numbers)
    width = -(-max(end for step in steps for _, end in step) // block)
    size = 2 + width * len(steps[0]), block, kept.width(block, dtype)
    cache = torch.full(size, float("nan"), dtype=dtype)  # nobody reads what nobody wrote
    own, truth = kept.of_blocks(cache.to(device, copy=True)), kept.of_blocks(cache.clone())
    backend, there = TritonBackend(device, multiprocessors=2), layer_on(layer, device)
    for number, spans in enumerate(steps):
        chunks = [(*span, list(range(1 + width * s, 1 + width * (s + 1)))) for s, span in enumerate(spans)]
        batch = batch_of(chunks)
        rows = rows_of(batch.tokens, number, dtype, shape)
        wanted = delta_rows(rows, layer, truth, block, batch)
        found = backend.delta(rows_on(rows, device), there, own, block, batch_on(batch, device)).to(dtype)
        close(found, wanted, roundings)
        states = own.cpu()
        assert torch.equal(states.isnan(), truth.isnan()), "of every block that is reached"
        close(states.nan_to_num().to(dtype), truth.nan_to_num(), roundings)


def test_prompts_of_any_lengths_are_four_launches(device, monkeypatch):
    made, shape, backend = [], shape_of("head"), TritonBackend(device, multiprocessors=2)
    monkeypatch.setattr(PreparedLaunch, "__call__", lambda launch, *_, **__: made.append(launch))
    layer, state = layer_on(layer_of(shape=shape), device), torch.zeros(80, shape.numbers, device=device)
    for spans in ([(0, 70)], [(0, 2000), (3, 90), (64, 300)]):
        batch = batch_of([(*span, list(range(80))) for span in spans])
        backend.delta(
            rows_on(rows_of(batch.tokens, shape=shape), device), layer, state, 32, batch_on(batch, device)
        )
        assert len(made) == 4
        made.clear()


@RULES
def test_prompts_forget_at_any_rate(rule, device, close):
    """Decays whose exponentials no float32 has, keys that are alike, and a key head of each size."""
    shape, tokens = DeltaShape(1, 2, 7, 35, 1, rule), 70
    layer, rows = layer_of(shape=shape), rows_of(tokens, 7, shape=shape)
    rows.mixed_TC[:, 7:14] = rows.mixed_TC[0, 7:14]
    rows.decay_TE[:] *= torch.tensor([0.0, 1.0, 200.0])[torch.arange(tokens) % 3][:, None]
    batch, kept = batch_of([(0, tokens, [1])]), StateShape(shape.numbers)
    own, truth = (torch.zeros(2, kept.numbers) for _ in "ot")
    wanted = delta_rows(rows, layer, truth, 80, batch)
    own = own.to(device)
    backend = TritonBackend(device, multiprocessors=2)
    found = backend.delta(rows_on(rows, device), layer_on(layer, device), own, 80, batch_on(batch, device))
    close(found, wanted, 256)
    close(own, truth, 256)


def layer_on(layer, device):
    tensors = {name: getattr(layer, name) for name in ("conv_WC", "bias_C", "skip_V")}
    return replace(layer, **{name: None if x is None else x.to(device) for name, x in tensors.items()})


def rows_on(rows, device):
    return DeltaRows(*(x.to(device) for x in (rows.mixed_TC, rows.decay_TE, rows.beta_TV)))


def batch_on(batch, device):
    names = "position_T", "kv_slot_T", "query_start_S1", "context_S", "block_table_SB"
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})
