"""Where attention could read a key too many or divide nothing by nothing: window edges, padding of a captured graph."""

import pytest
import torch

from afserve.kernels.paged import PagedBatch
from afserve.kernels.triton.attention import attend_gqa
from afserve.kernels.triton.config import AttentionTile
from afserve.kernels.triton.mla import attend_mla

TILE = AttentionTile(16, 16, 16, 4, 1)
BLOCK = 8


def batch_of(device, shape, most_blocks=6):
    """(queries, context) of each sequence over blocks of its own; a padding sequence has context 0."""
    starts = torch.tensor([0] + [q for q, _ in shape]).cumsum(0)
    position = [p for q, context in shape for p in range(max(context - q, 0), max(context - q, 0) + q)]
    at = torch.tensor(position, dtype=torch.int64)
    table = torch.arange(len(shape) * most_blocks).view(len(shape), most_blocks)
    contexts = torch.tensor([context for _, context in shape])
    moved = [t.to(device) for t in (at, at, starts.int(), contexts.int(), table.int())]
    return PagedBatch(*moved, max(q for q, _ in shape), max(c for _, c in shape))


def caches_of(device, sequences, most_blocks=6):
    """One key/value head; keys alike, values name their position, so that an output says which keys were averaged."""
    blocks = sequences * most_blocks
    k = torch.zeros(blocks, 1, BLOCK, 16)
    v = torch.arange(most_blocks * BLOCK).repeat(sequences).view(blocks, 1, BLOCK, 1).expand(-1, -1, -1, 16)
    return k.to(device), v.float().contiguous().to(device)


def mean_position(position, window):
    first = 0 if window is None else max(0, position - window + 1)
    return (first + position) / 2


@pytest.mark.by_day(1)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 32, 33, 34, 47])
def test_decode_sees_its_window_and_no_more(device, window, parts):
    shape = [(1, context) for context in (1, 15, 16, 17, 32, 33, 34, 47)]
    batch, (k, v) = batch_of(device, shape), caches_of(device, len(shape))
    q = torch.ones(len(shape), 2, 16, device=device)
    out = attend_gqa(q, k, v, batch, 1.0, window, None, TILE, TILE, parts).cpu()
    expected = torch.tensor([mean_position(context - 1, window) for _, context in shape])
    assert torch.allclose(out, expected[:, None, None].expand(out.shape), atol=1e-4)


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 33])
def test_a_chunk_sees_its_window_and_no_more(device, window):
    shape = [(20, 36), (17, 17), (33, 47)]
    batch, (k, v) = batch_of(device, shape), caches_of(device, len(shape))
    q = torch.ones(batch.tokens, 2, 16, device=device)
    out = attend_gqa(q, k, v, batch, 1.0, window, None, TILE, TILE, 1).cpu()
    expected = torch.tensor([mean_position(p, window) for p in batch.position_T.tolist()])
    assert torch.allclose(out, expected[:, None, None].expand(out.shape), atol=1e-4)


PADDED = [(1, 0), (1, 20), (1, 0)]
EMPTY = [(0, 30), (3, 20), (0, 0), (1, 9), (0, 12)]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_padding_of_a_captured_graph_gives_zeros(device, parts, sinks):
    batch, (k, v) = batch_of(device, PADDED), caches_of(device, len(PADDED))
    sink = torch.zeros(2, device=device) if sinks else None
    q = torch.ones(3, 2, 16, device=device)
    out = attend_gqa(q, k, v, batch, 1.0, None, sink, TILE, TILE, parts).cpu()
    assert torch.equal(out[::2], torch.zeros(2, 2, 16)) and torch.isfinite(out).all() and out[1].min() > 1
    latent = torch.cat((v, k), -1)[:, 0]
    wide = torch.ones(3, 2, 32, device=device)
    out = attend_mla(wide[..., :16], wide[..., 16:], latent, batch, 0.0, TILE, parts).cpu()
    assert torch.equal(out[::2], torch.zeros(2, 2, 16))
    assert torch.allclose(out[1], torch.full((2, 16), mean_position(19, None)), atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_sequences_without_a_query_are_passed_over(device, parts):
    batch, (k, v) = batch_of(device, EMPTY), caches_of(device, len(EMPTY))
    expected = torch.tensor([mean_position(p, None) for p in (17, 18, 19, 8)])[:, None, None].expand(4, 2, 16)
    q = torch.ones(4, 2, 16, device=device)
    out = attend_gqa(q, k, v, batch, 1.0, None, None, TILE, TILE, parts).cpu()
    assert torch.allclose(out, expected, atol=1e-4)
    latent, wide = torch.cat((v, k), -1)[:, 0], torch.ones(4, 2, 32, device=device)
    out = attend_mla(wide[..., :16], wide[..., 16:], latent, batch, 0.0, TILE, parts).cpu()
    assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_sink_of_minus_infinity_takes_nothing(device, parts):
    batch, (k, v) = batch_of(device, [(1, 20), (1, 0)]), caches_of(device, 2)
    q, sink = torch.ones(2, 2, 16, device=device), torch.full((2,), -torch.inf, device=device)
    out = attend_gqa(q, k, v, batch, 1.0, None, sink, TILE, TILE, parts).cpu()
    assert torch.allclose(out[0], torch.full((2, 16), mean_position(19, None)), atol=1e-4)
    assert torch.equal(out[1], torch.zeros(2, 16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter overflows with numpy
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_scores_of_any_size(device, scale):
    """One key towers over the others: it gets all the weight, and no NaN comes of the rest."""
    batch, (k, v) = batch_of(device, [(1, 20)]), caches_of(device, 1)
    k[0, 0, 3] = 100 * (1 if scale > 0 else -1)
    out = attend_gqa(torch.ones(1, 1, 16, device=device), k, v, batch, scale, None, None, TILE, TILE, 3)
    assert torch.equal(out.cpu(), torch.full((1, 1, 16), 3.0))
