"""A cache's blocks as bytes: the same on every backend, whatever order it keeps them in."""

import pytest
import torch
from torch import Tensor

from afserve.kernels.cache import LayerShape, PagedCache, StateShape
from afserve.kernels.ops import Ops, open_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tiles natively (blocks and heads of multiples of 16), wide tiles, rows, a value of another size, a latent row.
MIXED = [
    LayerShape(2, 32, 32), LayerShape(1, 64, 64), LayerShape(3, 24, 24), LayerShape(2, 48, 16), LayerShape(1, 40)
]  # fmt: skip
BLOCK, BLOCKS = 16, 7


def tokens_of(shape: LayerShape, layer: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values, or latent rows, of every token that fits, another number for each."""
    g = torch.Generator().manual_seed(layer)
    sizes = (
        [(shape.heads, shape.key)]
        if shape.value is None
        else [(shape.heads, n) for n in (shape.key, shape.value)]
    )
    return [torch.randn(BLOCKS * BLOCK, *size, generator=g).to(dtype) for size in sizes]


def filled(ops: Ops, dtype: torch.dtype) -> PagedCache:
    """Written by the ops that models write with."""
    cache, slot = ops.open_cache(MIXED, BLOCKS, BLOCK, dtype), torch.arange(BLOCKS * BLOCK)
    for number, (shape, layer) in enumerate(zip(MIXED, cache.layers, strict=True)):
        rows = tokens_of(shape, number, dtype)
        if len(rows) == 1:
            ops.write_latent(rows[0][:, 0], layer[0], slot)
        else:
            ops.write_kv(rows[0], rows[1], layer[0], layer[1], slot)
    return cache


def documented(dtype: torch.dtype) -> Tensor:
    """What the file's docstring says of the order of bytes."""
    parts = []
    for number, shape in enumerate(MIXED):
        for rows in tokens_of(shape, number, dtype):
            blocks = rows.view(BLOCKS, BLOCK, *rows.shape[1:]).transpose(1, 2)  # heads before tokens
            parts.append(blocks.reshape(BLOCKS, -1))
    return torch.cat(parts, 1).view(torch.uint8)


def test_the_order_of_bytes_is_the_documented_one(ops: Ops, truth: Ops) -> None:
    for dtype in DTYPES[:2]:
        for each in (ops, truth):
            cache = filled(each, dtype)
            assert cache.block_bytes == dtype.itemsize * BLOCK * sum(shape.elements for shape in MIXED)
            assert torch.equal(cache.read(range(BLOCKS)), documented(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [[6], [0, 1, 2], [5, 2, 6, 0]])
def test_a_layer_of_blocks_goes_alone(dtype: torch.dtype, blocks: list[int]) -> None:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    backends = {name: open_ops("cpu", 1, name) for name in ("native", "torch")}
    places = [(3 * n + 4) % BLOCKS for n in range(len(blocks))]
    for source in backends.values():
        kept = filled(source, dtype)
        for target in backends.values():
            cache = target.open_cache(MIXED, BLOCKS, BLOCK, dtype)
            layers = [kept.read_layer(layer, blocks) for layer in range(len(MIXED))]
            assert torch.equal(torch.cat(layers, 1), documented(dtype)[blocks]), (
                "together they are the blocks"
            )
            for layer, sent in enumerate(layers):
                assert cache.layer_bytes(layer) == sent.shape[1]
                cache.write_layer(layer, places, sent)
                assert torch.equal(cache.read_layer(layer, places), sent)
                rest = range(layer + 1, len(MIXED))
                assert not any(cache.read_layer(other, places).any() for other in rest), "of another layer"
            assert torch.equal(cache.read(places), documented(dtype)[blocks])
            with pytest.raises(ValueError, match="shape"):
                cache.write_layer(0, places, layers[0][:, 2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [[], [6], [0, 1, 2], [5, 2, 6, 0], list(range(BLOCKS))[::-1]])
def test_any_blocks_go_to_any_places_of_any_backend(dtype: torch.dtype, blocks: list[int]) -> None:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    backends = {name: open_ops("cpu", 1, name) for name in ("native", "torch")}
    places = [(3 * n + 4) % BLOCKS for n in range(len(blocks))]
    for source in backends.values():
        kept = filled(source, dtype)
        sent = kept.read(blocks)
        assert torch.equal(sent, documented(dtype)[blocks])
        for target in backends.values():
            cache = target.open_cache(MIXED, BLOCKS, BLOCK, dtype)
            cache.write(places, sent)
            assert torch.equal(cache.read(places), sent)
            rest = [block for block in range(BLOCKS) if block not in places]
            assert not cache.read(rest).any(), "a block was written that was not named"
        assert torch.equal(kept.read(range(BLOCKS)), documented(dtype)), "reading changed something"


def test_what_was_written_is_what_ops_read(ops: Ops, truth: Ops) -> None:
    """Blocks from the reference, attended over natively where they lie, give what the reference sees."""
    from tests.kernels.test_native_layer import decode_batch

    batch, shape = decode_batch([64, 33]), LayerShape(2, 32, 32)
    g = torch.Generator().manual_seed(4)
    k, v, q = (
        torch.randn(128, 2, 32, generator=g),
        torch.randn(128, 2, 32, generator=g),
        torch.randn(2, 4, 32, generator=g),
    )
    plain, fast = (each.open_cache([shape], 8, 16, torch.float32) for each in (truth, ops))
    truth.write_kv(k, v, *plain.layers[0], torch.arange(128))
    fast.write([5, 1, 0, 4, 2, 3, 7, 6], plain.read([5, 1, 0, 4, 2, 3, 7, 6]))
    wanted = truth.attend_gqa(q, *plain.layers[0], batch, 0.2)
    torch.testing.assert_close(ops.attend_gqa(q, *fast.layers[0], batch, 0.2), wanted, atol=2e-6, rtol=1e-5)


def test_bytes_that_begin_anywhere_are_taken(truth: Ops) -> None:
    cache = filled(truth, torch.float32)
    sent = cache.read([1, 2])
    message = torch.cat((torch.zeros(3, dtype=torch.uint8), sent.flatten()))
    cache.write([4, 0], message[3:].view(2, -1))
    assert torch.equal(cache.read([4, 0]), sent)


def test_what_is_no_block_is_refused(truth: Ops) -> None:
    cache = filled(truth, torch.float32)
    sent, before = cache.read([1, 2]), cache.read(range(BLOCKS))
    for blocks, payload, told in [
        ([BLOCKS], sent[:1], f"blocks: {BLOCKS}, the cache has {BLOCKS}"),
        ([-1], sent[:1], "blocks: -1"),
        ([3, 3], sent, "blocks: 1 of 2 are named twice"),
        ([3], sent, "bytes_NY: shape"),
        ([3, 4], sent[:, :-1], "bytes_NY: shape"),
        ([3, 4], sent.to(torch.int16), "bytes_NY: .*int16"),
    ]:
        with pytest.raises(ValueError, match=told):
            cache.write(blocks, payload)
    with pytest.raises(ValueError, match="blocks: 9"):
        cache.read([0, 9])
    assert torch.equal(cache.read(range(BLOCKS)), before)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_parts_of_a_block_are_its_bytes_where_the_memory_has_their_order(name: str) -> None:
    if name == "native":
        pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    ops = open_ops("cpu", 1, name)
    shapes = [LayerShape(1, 40), StateShape(300), LayerShape(3, 24, 24)]
    cache = ops.open_cache(shapes, BLOCKS, BLOCK, torch.bfloat16)
    assert cache.part_bytes == 16 * 38 * 2, "300 numbers need 38 elements for each of 16 tokens"
    sent = torch.randint(0, 255, (2, cache.block_bytes), dtype=torch.uint8)
    for block, parts in enumerate(cache.parts([5, 2])):
        at = 0
        for part in parts:
            part[:] = sent[block, at : at + len(part)].numpy().data
            at += len(part)
        assert at == cache.block_bytes
    assert torch.equal(cache.read([5, 2]), sent)
    with pytest.raises(ValueError, match=f"blocks: 7, the cache has {BLOCKS}"):
        cache.parts([7])


def test_tiles_are_in_another_order() -> None:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    assert not open_ops("cpu", 1, "native").open_cache(MIXED, BLOCKS, BLOCK, torch.bfloat16).part_bytes
