"""The native library's pass over blocks gives what Python gives, and touches no memory but that of right blocks."""

import os

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.disk.passes import CacheMemory, Passes
from afserve.comm.disk.record import checksum_of
from afserve.comm.native import native_library
from afserve.kernels.cache import LayerShape
from afserve.kernels.devices.memory_part import MemoryPart
from afserve.kernels.ops import open_ops

PASSES = Passes.open(700)
pytestmark = pytest.mark.skipif(PASSES is None, reason="the native library was not built")
WIDTHS = (300, 13, 387)
NAMES = [bytes([number]) * 16 for number in range(6)]


def cache(blocks, count=8):
    """(tensors, memory): a cache of three tensors."""
    tensors = [np.zeros((count, width), np.uint8) for width in WIDTHS]
    return tensors, CacheMemory(
        tuple(MemoryPart(one.ctypes.data, one.shape[1], one.shape[1]) for one in tensors), blocks
    )


def drawn(seed, count=6):
    return np.random.default_rng(seed).integers(0, 256, (count, sum(WIDTHS)), np.uint8)


@given(st.integers(241, 9000), st.integers(0, (1 << 64) - 1))
def test_a_checksum_is_that_of_xxhash(size, seed):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert native_library().xxh3(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@pytest.mark.parametrize("size", [241, 256, 1023, 1024, 1025, 1088, 1089, 2048, 2049])
def test_a_checksum_at_the_ends_of_stripes_and_blocks(size):
    data = bytes(range(256)) * 9
    assert native_library().xxh3(data[:size], 3) == xxhash.xxh3_64_intdigest(data[:size], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (48, 16), (24, 24), (576, None)])
def test_a_cache_in_tiles_gives_and_takes_what_it_reads(dtype, size):
    """Blocks in any order of memory, to a cache that has it as plain rows and back."""
    pages = [
        open_ops("cpu", 1, name).open_cache([LayerShape(2, *size), LayerShape(1, 64, 64)], 9, 32, dtype)
        for name in ("native", "torch", "native")
    ]
    g = torch.Generator().manual_seed(1)
    random = torch.randint(0, 256, (9, pages[0].block_bytes), dtype=torch.uint8, generator=g)
    pages[0].write(range(9), random)
    blocks = [[7, 0, 3], [1, 2, 8], [5, 6, 4]]
    memory = [CacheMemory(one.memory, which) for one, which in zip(pages, blocks, strict=True)]
    piece = memoryview(bytearray(3 * pages[0].block_bytes))
    for before, after, at in zip(memory, memory[1:], (0, 1), strict=False):
        sums = PASSES.take_piece(before, NAMES[:3], piece)
        assert bytes(piece) == random[blocks[0]].numpy().tobytes()
        assert PASSES.fill_piece(piece, after, NAMES[:3]) == sums
        assert torch.equal(pages[at + 1].read(blocks[at + 1]), random[blocks[0]])
        rest = [block for block in range(9) if block not in blocks[at + 1]]
        assert not pages[at + 1].read(rest).any()


@given(st.integers(241, 90000), st.integers(1, 20000), st.integers(0, (1 << 64) - 1))
def test_blocks_in_one_piece_go_out_and_in_with_their_checksums(width, other, seed):
    """Also where a block's parts end in the middle of what is hashed and moved at once."""
    random = np.random.default_rng(seed)
    own, theirs = (
        [random.integers(0, 256, (5, size), np.uint8) for size in (width, other)] for _ in range(2)
    )
    memory, there = (
        CacheMemory(tuple(MemoryPart(one.ctypes.data, one.shape[1], one.shape[1]) for one in tensors), blocks)
        for tensors, blocks in ((own, [4, 0, 2]), (theirs, [1, 3, 0]))
    )
    piece = bytearray(3 * (width + other))
    sums = PASSES.take_piece(memory, NAMES[:3], memoryview(piece))
    rows = [np.concatenate([one[block] for one in own]) for block in (4, 0, 2)]
    assert piece == b"".join(row.tobytes() for row in rows)
    assert sums == [checksum_of(name, row.tobytes()) for name, row in zip(NAMES, rows, strict=False)]
    before = [one.copy() for one in theirs]
    assert PASSES.fill_piece(memoryview(bytes(piece)), there, NAMES[:3]) == sums
    for block, row in zip((1, 3, 0), rows, strict=True):
        assert (np.concatenate([one[block] for one in theirs]) == row).all()
    assert all((one[[2, 4]] == was[[2, 4]]).all() for one, was in zip(theirs, before, strict=True))
    with pytest.raises(ValueError, match="too little memory"):
        PASSES.fill_piece(memoryview(bytes(piece))[:-1], there, NAMES[:3])
    with pytest.raises(ValueError, match="too little memory"):
        PASSES.take_piece(memory, NAMES[:3], memoryview(piece)[:-1])


@pytest.mark.parametrize(
    "part",
    [
        MemoryPart(0, 700, 699),
        MemoryPart(0, 700, 700, 3),
        MemoryPart(0, 1024, 1024, 1, 24, 2),
        MemoryPart(0, 1000, 1000, 1, 16, 2),
        MemoryPart(0, 1024, 1024, 2, 16, 1),
    ],
)
def test_parts_that_cannot_be_are_refused(part):
    with pytest.raises(ValueError, match="cannot be"):
        PASSES.fill_piece(memoryview(b"x" * 5000), CacheMemory((part,), [0]), NAMES[:1])


@given(st.permutations(range(8)), st.sets(st.integers(0, 5)))
def test_only_right_blocks_are_put(order, wrong):
    rows, (tensors, memory) = drawn(1), cache(order[:6])
    sums = [
        checksum_of(name, row.tobytes()) ^ (at in wrong)
        for at, (name, row) in enumerate(zip(NAMES, rows, strict=True))
    ]
    addresses = [rows.ctypes.data + at * rows.shape[1] for at in range(6)]
    assert PASSES.put(addresses, memory, NAMES, sums) == [at not in wrong for at in range(6)]
    for block in range(8):
        at = order.index(block)
        wanted = rows[at] if at < 6 and at not in wrong else np.zeros(700, np.uint8)
        assert (np.concatenate([one[block] for one in tensors]) == wanted).all()


@given(st.permutations(range(8)))
def test_what_is_taken_has_its_checksum(order):
    tensors, memory = cache(order[:6])
    rows, out = drawn(2, 8), np.zeros((6, 700), np.uint8)
    for block in range(8):
        for one, part in zip(tensors, np.split(rows[block], np.cumsum(WIDTHS)[:-1]), strict=True):
            one[block] = part
    addresses = [out.ctypes.data + at * 700 for at in reversed(range(6))]
    sums = PASSES.take(memory, addresses, NAMES)
    assert (out[::-1] == rows[order[:6]]).all()
    assert sums == [checksum_of(name, row.tobytes()) for name, row in zip(NAMES, out[::-1], strict=True)]


@pytest.mark.parametrize("window", [1024, 2500, 1 << 16])
def test_a_file_is_read_by_windows_to_its_end(window, tmp_path):
    """The last block is cut."""
    rows, (tensors, memory) = drawn(3), cache([5, 0, 1, 2, 7, 6])
    sums = [checksum_of(name, row.tobytes()) for name, row in zip(NAMES, rows, strict=True)]
    path = tmp_path / "data"
    path.write_bytes(b"x" * 100 + b"".join(row.tobytes() + b"\1" * 324 for row in rows)[: 5 * 1024 + 699])
    file = os.open(path, os.O_RDONLY)
    try:
        got = PASSES.read(file, 100, 1024, memoryview(bytearray(window)), memory, NAMES, sums)
    finally:
        os.close(file)
    assert got == [True] * 5 + [False]
    for at, block in enumerate(memory.blocks[:5]):
        assert (np.concatenate([one[block] for one in tensors]) == rows[at]).all()
    assert not any(one[6].any() for one in tensors)
    with pytest.raises(OSError, match="6 blocks at 100 cannot be read"):
        PASSES.read(file, 100, 1024, memoryview(bytearray(window)), memory, NAMES, sums)


def test_what_cannot_be_is_refused():
    _, memory = cache([1])
    with pytest.raises(ValueError, match="a pitch or window too small"):
        PASSES.read(0, 0, 699, memoryview(bytearray(1024)), memory, NAMES[:1], [1])
    with pytest.raises(ValueError, match="a pitch or window too small"):
        PASSES.read(0, 0, 1024, memoryview(bytearray(1023)), memory, NAMES[:1], [1])
    with pytest.raises(ValueError, match="as many addresses as blocks"):
        PASSES.put([], memory, NAMES[:1], [1])
    with pytest.raises(ValueError, match="fewer than 241 bytes"):
        PASSES.take(CacheMemory((MemoryPart(1, 240, 240),), [0]), [1], NAMES[:1])
    assert Passes.open(240) is None
