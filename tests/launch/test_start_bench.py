"""What `bench.start` measures with: memory that processes had for a moment, and reads of files past the page cache."""

import os
import subprocess
import sys
import time

import pytest

from bench import file_reads
from bench.file_reads import PIECE, cache_speed, disk_speed, forget
from bench.peak_memory import PeakMemory, memory_of
from tests.patching import patch_library

MIB = 1 << 20
HOLDS = "import sys, time; kept = b'x' * (96 << 20); print('made', flush=True); sys.stdin.read()"
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads what Linux tells")


@pytest.mark.slow
def test_memory_of_a_child_is_seen_and_kept_after_its_end():
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with PeakMemory(os.getpid()) as peaks, child:
        assert child.stdout is not None and child.stdout.readline() == "made\n"
        until = time.monotonic() + 30
        while child.pid not in peaks.of and time.monotonic() < until:
            time.sleep(0.01)
        peaks.look()
        child.communicate()
    assert 96 * MIB <= peaks.of[child.pid].own < 160 * MIB
    assert peaks.of[child.pid].own <= peaks.of[child.pid].resident
    assert peaks.together >= peaks.of[child.pid].own + 5 * MIB, "this process has some as well"
    assert memory_of(child.pid) is None


@pytest.mark.slow
def test_every_byte_that_was_asked_for_is_read(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("one", "two")]
    for path in files:
        path.write_bytes(os.urandom(PIECE + 4096))
    forget(files)
    read = []
    plain = os.preadv

    def counted(descriptor, buffers, offset):
        read.append(plain(descriptor, buffers, offset))
        return read[-1]

    patch_library(monkeypatch, file_reads, "os", preadv=counted)
    assert cache_speed(files, 10 * PIECE) > 0
    assert sum(read) == 3 * 2 * (PIECE + 4096), "once into the cache, then by one and by four readers"
    read.clear()
    try:
        assert disk_speed(files, PIECE) > 0
    except OSError:
        pytest.skip("this file system has no reads past the page cache")
    assert sum(read) == 4 * PIECE
