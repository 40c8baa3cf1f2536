"""The store on disk: whatever happens to its files or its process, a block that it gives is the block that was kept."""

import errno
import hashlib
import os
import signal
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.comm.disk.files import File, Lane
from afserve.comm.disk.passes import CacheMemory, Passes
from afserve.comm.disk.record import (
    HEAD_BYTES,
    RECORD_BYTES,
    BlockRecord,
    StoreFormat,
    checksum_of,
    decode_records,
    encode_record,
)
from afserve.comm.disk.ring import Ring
from afserve.comm.disk.store import DAMAGED, UNREADABLE, DiskStore
from afserve.comm.disk.ways import CHOICE, Measured, Way, chosen, fastest, measure, save
from afserve.comm.disk.workers import DiskWorkers
from afserve.errors import ConfigError
from afserve.kernels.devices.memory_part import MemoryPart
from tests.warm.interpreter import Warm

WHAT = "5c" * 32
SIZE = 700  # of a block; slots lie 1,024 bytes apart
CAPACITY = 12
LIMIT = CAPACITY * 1024


def name_of(number):
    return hashlib.blake2b(f"{number}".encode(), digest_size=16).digest()


def block_of(name):
    return (name * (SIZE // 16 + 1))[:SIZE]


def names(*numbers):
    return [name_of(number) for number in numbers]


def opened(folder, limit=LIMIT, spared=0, lane=0, direct=False):
    return DiskStore.open(Path(folder), WHAT, SIZE, limit, lane, spared=spared, direct=direct)


def keep(store, chain):
    store.write(chain, b"".join(map(block_of, chain)))


PARTS = (300, SIZE - 300)  # of a block, in a cache of two tensors


def passes():
    found = Passes.open(SIZE)
    if found is None:
        pytest.skip("the native library was not built")
    return found


@pytest.fixture(params=["native", "python"])
def by(request):
    """How blocks are read: in one pass of the native library, or step by step."""
    return passes() if request.param == "native" else None


def into_a_cache(by, store, span):
    """How many blocks are right, and those. Blocks of the cache that are not right stay as they are."""
    tensors = [np.full((20, part), 7, np.uint8) for part in PARTS]
    blocks = [3 * at % 20 for at in range(len(span.names))]
    memory = CacheMemory(tuple(MemoryPart(one.ctypes.data, *2 * (one.shape[1],)) for one in tensors), blocks)
    right = store.fetch_checked(by, span, memory, memoryview(bytearray(2 * 1024)))
    got = [b"".join(one[block].tobytes() for one in tensors) for block in blocks]
    assert all(one == b"\7" * SIZE for one in got[right : right + 1])
    assert all((one[block] == 7).all() for one in tensors for block in set(range(20)) - set(blocks))
    return right, got


def read(store, chain, most=4 * 1024, by=None):
    """The names that came back, each with the right bytes."""
    buffer, found = memoryview(bytearray(16 * 1024)), []
    for span in store.spans(chain, most):
        if by is None:
            right = store.read(span, buffer)
            got = [bytes(buffer[at * 1024 : at * 1024 + SIZE]) for at in range(right)]
        else:
            right, got = into_a_cache(by, store, span)
        for name, block in zip(span.names[:right], got, strict=False):
            assert block == block_of(name)
        found += span.names[:right]
        if right < len(span.names):
            break
    store.check()
    return found


def test_blocks_are_found_in_order_and_over_a_restart(tmp_path):
    store, chain = opened(tmp_path), names(*range(7))
    keep(store, chain[:5])
    keep(store, chain[5:])
    assert store.run(chain) == 7 and store.run(names(1, 9, 2)) == 1 and store.run(names(9)) == 0
    assert [len(span.names) for span in store.spans(chain, 4096)] == [4, 3]
    assert read(store, chain) == chain
    store.close()
    again = opened(tmp_path)
    assert (again.blocks, again.capacity) == (7, CAPACITY) and read(again, chain) == chain
    keep(again, names(*range(7, 19)))
    assert again.blocks == CAPACITY and again.overwritten == 7 and again.run(chain) == 0
    assert (again.folder / "data").stat().st_size <= LIMIT
    again.close()


def test_a_block_that_is_overwritten_soon_is_wanted_again(tmp_path):
    store = opened(tmp_path)
    keep(store, names(*range(CAPACITY)))
    assert store.worth_writing(names(0, 2, 3, 11, 99)) == names(0, 2, 99)
    keep(store, names(0, 1))
    assert read(store, names(0, 1)) == names(0, 1) and store.blocks == CAPACITY
    store.close()


def test_a_smaller_store_keeps_what_fits(tmp_path):
    store = opened(tmp_path)
    keep(store, names(*range(CAPACITY)))
    store.close()
    small = opened(tmp_path, limit=5 * 1024)
    assert small.blocks == small.capacity == 5 and read(small, names(*range(5))) == names(*range(5))
    assert (small.folder / "data").stat().st_size == 5 * 1024
    small.close()


def test_blocks_of_another_kind_are_thrown_away(tmp_path):
    store = opened(tmp_path)
    keep(store, names(1))
    store.close()
    other = DiskStore.open(tmp_path, WHAT, SIZE + 1, LIMIT, spared=0)  # same digest, by a newer program
    assert other.folder == store.folder and other.blocks == 0 and other.run(names(1)) == 0
    other.close()
    assert DiskStore.open(tmp_path, "6d" * 32, SIZE, LIMIT).folder.parent != store.folder.parent


def test_two_owners_never_share_files(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.folder != second.folder
    keep(first, names(1))
    assert second.run(names(1)) == 0
    second.close()
    third = opened(tmp_path, lane=0)
    assert third.folder == second.folder
    first.close()
    third.close()


def test_a_folder_that_cannot_be_used_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_full_disk_makes_the_ring_smaller(tmp_path, monkeypatch, failing):
    """The write that fails has written a part."""
    store, calls, write = opened(tmp_path), [], File.write

    def full(self, parts, offset):
        calls.append(offset)
        if len(calls) >= failing and offset >= 3 * 1024 and self.path.name == "data":
            write(self, [b"".join(map(bytes, parts))[:100]], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, parts, offset)

    monkeypatch.setattr(File, "write", full)
    for start in range(0, 30, 3):
        keep(store, names(*range(start, start + 3)))
        assert read(store, names(*range(start, start + 3))) == names(*range(start, start + 3))
    assert 3 <= store.capacity < CAPACITY
    store.close()
    again = opened(tmp_path)
    for number in range(30):
        read(again, names(number))
    again.close()


@pytest.mark.parametrize("name", ["data", "index"])
def test_files_that_were_removed_are_not_written_to(name, tmp_path):
    """They would take room until the process ends, and nobody would find them again."""
    store = opened(tmp_path)
    keep(store, names(1))
    (store.folder / name).unlink()
    with pytest.raises(OSError, match="its files were removed"):
        keep(store, names(2))
    assert read(store, names(1)) == names(1)
    store.close()


def test_a_disk_without_room_at_all_says_so(tmp_path):
    store = opened(tmp_path, spared=1 << 60)
    with pytest.raises(OSError, match="MiB are free"):
        keep(store, names(1))
    assert store.blocks == 0
    store.close()


def test_what_cannot_be_read_is_dropped(by, tmp_path, monkeypatch):
    store, chain = opened(tmp_path), names(1, 2, 3)
    keep(store, chain)

    def broken(self, read):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(File, "read_by", broken)
    assert read(store, chain, by=by) == [] and store.dropped[UNREADABLE] == 3 and store.blocks == 0
    store.close()


def test_a_record_belongs_to_its_slot():
    record = BlockRecord(name_of(1), 4, 77)
    raw = encode_record(2, record)
    assert list(decode_records(bytes(2 * RECORD_BYTES) + raw)) == [(2, record)]
    assert list(decode_records(raw)) == [] and StoreFormat("a", 1, 512) != StoreFormat("a", 2, 512)


BLOCK = st.integers(0, 40)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.lists(BLOCK, min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("read"), st.lists(BLOCK, min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("flip"), st.sampled_from(("data", "index")), st.integers(0, 1 << 20)),
        st.tuples(st.just("cut"), st.sampled_from(("data", "index")), st.integers(0, 1 << 14)),
        st.tuples(
            st.just("torn"), st.lists(BLOCK, min_size=1, max_size=6, unique=True), st.integers(0, 8000)
        ),
        st.tuples(st.just("swap"), st.integers(0, CAPACITY - 1), st.integers(0, CAPACITY - 1)),
        st.tuples(st.just("restart"), st.integers(4, CAPACITY)),
    ),
    max_size=40,
)


class Killed(Exception):
    """The process ends here."""


class Scene:
    """A store, its files, and whether anything was done to them that lets blocks be missing."""

    def __init__(self, folder, by):
        self.folder, self.store, self.harmed, self.by = folder, opened(folder), False, by

    def keep(self, chain):
        keep(self.store, names(*chain))
        assert (
            self.store.run(names(*chain)) == len(chain) <= self.store.capacity
            or len(chain) > self.store.capacity
        )

    def read(self, chain):
        wanted = self.store.run(names(*chain))
        found = read(self.store, names(*chain), by=self.by)
        assert self.harmed or len(found) == wanted

    def flip(self, file, at):
        path = self.store.folder / file
        data = bytearray(path.read_bytes())
        if data:
            data[at % len(data)] ^= 1 << at % 8
            path.write_bytes(data)
            self.harmed = True

    def cut(self, file, at):
        os.truncate(self.store.folder / file, min(at, (self.store.folder / file).stat().st_size))
        self.harmed = True

    def swap(self, one, other):
        """Two slots' records: as a disk does that loses an order."""
        path = self.store.folder / "index"
        data = bytearray(path.read_bytes())
        one, other = (HEAD_BYTES + slot * RECORD_BYTES for slot in (one, other))
        if max(one, other) + RECORD_BYTES <= len(data):
            first, second = data[one : one + RECORD_BYTES], data[other : other + RECORD_BYTES]
            data[one : one + RECORD_BYTES], data[other : other + RECORD_BYTES] = second, first
            path.write_bytes(data)
            self.harmed = True

    def torn(self, chain, most):
        """The process is killed after so many bytes of a write."""
        write, left = File.write, [most]

        def some(file, parts, offset):
            raw = b"".join(map(bytes, parts))
            write(file, [raw[: left[0]]], offset)
            left[0] -= len(raw)
            if left[0] < 0:
                left[0] = 0
                raise Killed

        File.write = some
        try:
            keep(self.store, names(*chain))
        except Killed:
            self.restart(CAPACITY)
        finally:
            File.write = write

    def restart(self, capacity):
        self.store.close()
        File.write, write = _WRITE, File.write
        self.store = opened(self.folder, limit=capacity * 1024)
        File.write = write


_WRITE = File.write


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(actions=ACTIONS)
def test_no_wrong_block_whatever_happens_to_the_files(native, actions):
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(folder, passes() if native else None)
        try:
            for what, *arguments in actions:
                getattr(scene, what)(*arguments)
                scene.store.check()
            for number in range(41):
                scene.read([number])
            assert scene.harmed or not scene.store.dropped[DAMAGED]
            keep(scene.store, names(100, 101))  # usable
            assert read(scene.store, names(100, 101)) == names(100, 101)
        finally:
            scene.store.close()


@settings(max_examples=150, deadline=None, database=None)
@given(st.integers(1, 9), st.lists(st.lists(BLOCK, min_size=1, max_size=5, unique=True), max_size=12))
def test_a_ring_is_what_was_put_last(capacity, chains):
    ring, last = Ring(capacity), []
    for chain in chains:
        left = list(chain)
        while left:
            for slot in ring.take(len(left)):
                name = name_of(left.pop(0))
                ring.put(slot, name, 0)
                last = [*(one for one in last if one != name), name][-capacity:]
        ring.check()
        assert set(ring._slot_of) <= set(last)
        assert last[-1] in ring


def test_what_was_measured_as_fastest_is_used(tmp_path):
    assert chosen(tmp_path) == Way() == Way(False, 2)
    found = measure(tmp_path, size=1 << 20, ways=(Way(False, 1), Way(True, 2)), rounds=2)
    assert found[0].way == Way(False, 1) and all(one.rate > 0 for one in found)
    assert all(one.cost > 0 for one in found)
    save(tmp_path, Measured(Way(True, 4), 1e9))
    assert chosen(tmp_path) == Way(True, 4) and str(Way(True, 4)) == "4 threads, past the page cache"
    for text in ("{", '{"direct": 1, "readers": 2}', '{"direct": true, "readers": 99}', '["direct"]'):
        (tmp_path / CHOICE).write_text(text)
        assert chosen(tmp_path) == Way()
    with pytest.raises(ConfigError, match=r"--io .*nowhere"):
        measure(tmp_path / "nowhere")


def test_of_ways_that_are_nearly_as_fast_the_cheapest_is_used():
    best, cheap, slow = (
        Measured(Way(True, 16), 1.00e9, 3e-10),
        Measured(Way(False, 1), 0.96e9, 2e-10),
        Measured(Way(True, 1), 0.90e9, 1e-10),
    )
    assert fastest([best, slow]) == best and fastest([slow, cheap, best]) == cheap


def test_memory_for_reads_is_bounded_whatever_the_way():
    for way in (Way(False, 1), Way(False, 2), Way(True, 4), Way(True, 16)):
        assert 1 << 20 <= way.piece_bytes <= way.most_piece_bytes
        assert way.readers * way.most_piece_bytes <= 64 << 20


def test_what_is_read_later_is_placed_behind_what_was_asked_before(tmp_path):
    store, chain = opened(tmp_path), names(*range(7))
    keep(store, chain)
    workers = DiskWorkers(store, way=Way(readers=1))
    workers.start()
    try:
        assert workers.read(1, chain[:3]) == 3 and workers.read(1, chain[3:], 3) == 4
        wait(lambda: len(workers.done) == 2)
        found = [(one.span.begin, one.right) for one in workers.done]
        assert found == [(0, 3), (3, 4)]
    finally:
        workers.close()


def test_direct_reads_give_the_same_blocks(by, tmp_path):
    """Where buffers do not begin at a page, or the file system cannot, it is read through the page cache."""
    store, chain = opened(tmp_path, direct=True), names(*range(7))
    keep(store, chain)
    assert read(store, chain, by=by) == chain
    workers = DiskWorkers(store, way=Way(readers=1))
    workers.start()
    assert workers.read(1, chain) == 7
    wait(lambda: workers.done)
    one = workers.done.popleft()
    assert one.right == 7 and one.buffer[6 * 1024 : 6 * 1024 + SIZE] == block_of(chain[6])
    workers.close()


def test_threads_read_and_write_beside_each_other(tmp_path):
    store = opened(tmp_path)
    workers = DiskWorkers(store)
    workers.start()
    try:
        for turn in range(20):
            chain = names(*range(turn * 3, turn * 3 + 3))
            if workers.worth_writing(chain[:1]):
                workers.write(chain, b"".join(map(block_of, chain)))
            wait(lambda: not workers.writing)
            coming = workers.read(turn, chain)
            assert coming == 3
            came = 0
            while came < coming:
                wait(lambda: workers.done)
                one = workers.done.popleft()
                assert one.job == turn and one.right == len(one.span.names)
                came += one.right
                workers.return_buffer(one)
            workers.end(turn)
    finally:
        workers.close()


def test_both_ways_drop_the_same_blocks(by, tmp_path):
    """A block in the middle is another one, the last is cut: what comes first is right, what is wrong is forgotten."""
    store, chain = opened(tmp_path), names(*range(6))
    keep(store, chain)
    path = store.folder / "data"
    data = bytearray(path.read_bytes())
    data[2 * 1024 + 699] ^= 1
    path.write_bytes(data[: 5 * 1024 + 699])
    assert read(store, chain, most=1 << 20, by=by) == chain[:2]
    assert store.dropped[DAMAGED] == 2 and store.holds(chain) == [True, True, False, True, True, False]
    assert read(store, chain[3:5], by=by) == chain[3:5] and store.bytes_read == 4 * SIZE
    store.close()


def wait(until):
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.process
def test_a_writer_that_is_killed_leaves_a_store_without_a_wrong_block(tmp_path):
    """Three lives, each killed while it writes without a pause."""
    with closing(Warm(__name__, "afserve.launch.processes.forker", "afserve.server.text.text_pool")) as warm:
        for _ in range(3):
            reading, writing = os.pipe()
            with open(reading, "rb") as said, open(writing, "wb") as output:
                process = warm.run(["tests.comm.endless", str(tmp_path)], output)
                assert said.readline()
                time.sleep(0.05)
                process.kill()
                assert process.wait(60) == -signal.SIGKILL
            store = opened(tmp_path)
            assert store.folder.name == "0"  # the lock ended with its process
            for number in range(40):
                read(store, names(number))
            assert store.dropped[DAMAGED] == 0
            keep(store, names(100, 101))
            assert read(store, names(100, 101)) == names(100, 101)
            store.close()


def test_a_failed_write_that_is_not_for_lack_of_room_forgets_nothing_else(tmp_path, monkeypatch):
    store, chain = opened(tmp_path), names(1, 2, 3)
    keep(store, chain)

    def broken(self, parts, offset):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(File, "write", broken)
    with pytest.raises(OSError, match="Read-only"):
        keep(store, names(4))
    assert read(store, chain) == chain
    store.close()


def test_a_folder_that_is_made_is_this_users_alone(tmp_path):
    lane = Lane.take(tmp_path / "kv" / "model" / "layout", 0)
    folders = [path for path in lane.folder.parents if path.is_relative_to(tmp_path / "kv")]
    modes = [path.stat().st_mode & 0o777 for path in (*folders, lane.folder, lane.folder / "lock")]
    lane.close()
    assert modes == [0o700] * 4 + [0o600]


def test_blocks_are_read_into_memory_in_parts(tmp_path):
    """More of them than the system takes at once, and a file that ends within one."""
    lane = Lane.take(tmp_path, 0)
    content = os.urandom(5000)
    lane.data.write([content], 0)
    memory = bytearray(5000)
    parts = [memoryview(memory)[at : at + 3] for at in range(0, 4800, 3)]
    assert lane.data.read_parts(parts, 0) == 4800 and memory[:4800] == content[:4800]
    assert lane.data.read_parts([memoryview(memory)[:300], memoryview(memory)[300:700]], 4500) == 500
    assert memory[:500] == content[4500:]
    lane.close()


def test_a_checksum_is_the_same_in_parts():
    name, block = names(1)[0], block_of(names(1)[0])
    assert checksum_of(name, block) == checksum_of(name, block[:100], block[100:101], block[101:])
    assert checksum_of(name, block) != checksum_of(name, block[:100], block[100:-1])
