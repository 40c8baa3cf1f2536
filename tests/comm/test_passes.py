"""The native library's pass over blocks gives what Python gives, and touches no memory but that of right blocks."""

import os

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.disk.passes import CacheMemory, Passes
from afserve.comm.disk.record import checksum_of
from afserve.comm.native import native_library

PASSES = Passes.open(700)
pytestmark = pytest.mark.skipif(PASSES is None, reason="the native library was not built")
WIDTHS = (300, 13, 387)
NAMES = [bytes([number]) * 16 for number in range(6)]


def cache(blocks, count=8):
    """(tensors, memory): a cache of three tensors."""
    tensors = [np.zeros((count, width), np.uint8) for width in WIDTHS]
    return tensors, CacheMemory(tuple((one.ctypes.data, one.shape[1]) for one in tensors), blocks)


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
        PASSES.take(CacheMemory(((1, 240),), [0]), [1], NAMES[:1])
    assert Passes.open(240) is None
