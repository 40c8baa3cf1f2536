"""A process that reads for the store: what comes is right whatever becomes of it, and it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.comm.disk import reader as reader_module
from afserve.comm.disk.files import File
from afserve.comm.disk.reader import DiskReader, ReadQueue
from afserve.comm.disk.reader_wire import ReadAsk, ReaderSetup, ReadReply
from afserve.comm.disk.store import DAMAGED
from afserve.comm.disk.ways import CHOICE, Measured, Way, chosen, fastest, measure, save
from afserve.comm.disk.workers import DiskWorkers
from tests.comm.readers import KINDS, command_of, plain
from tests.comm.test_disk import (
    ACTIONS,
    Scene,
    block_of,
    into_a_cache,
    keep,
    names,
    opened,
    passes,
    wait,
)
from tests.open_files import left_open, open_files

pytestmark = pytest.mark.process
QUEUE = ReadQueue(2, 4096, 4)
PAGE = 4096


@pytest.fixture(params=KINDS)
def command(request, monkeypatch):
    return command_of(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_else_collected):
    """No process, no descriptor, no thread."""
    before = open_files()
    yield
    assert not left_open(before)
    assert not [one for one in psutil.Process().children() if "reader" in " ".join(one.cmdline())]
    assert not [one.name for one in threading.enumerate() if one.name.startswith("disk-")]


class Started:
    """A reader of one file, and what it told."""

    def __init__(self, path, command, windows=4, window_bytes=4 * PAGE):
        self.told, self.file = [], File(path)
        self.reader = DiskReader([self.file], QUEUE, windows, window_bytes, command, self.told.append)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *failed):
        self.reader.close()
        self.reader.close()
        self.file.close()


def test_a_file_is_read_from_any_place(tmp_path, command):
    """Sectors by the process, what fills none by this one, and nothing behind the file's end."""
    content = os.urandom(9 * PAGE + 700)
    (tmp_path / "data").write_bytes(content)
    with Started(tmp_path / "data", command) as one:
        assert one.reader.wait_ready(), one.told
        windows = one.reader.windows

        @settings(max_examples=200, deadline=None, database=None)
        @given(st.integers(0, 20 * 512), st.integers(1, 4 * PAGE), st.integers(0, 3), st.booleans())
        def check(offset, size, window, aligned):
            offset = offset // 512 * 512 if aligned else offset
            windows[window][:] = b"\7" * 4 * PAGE
            came = one.reader.read_into(windows[window][:size], one.file, offset)
            assert windows[window][:came] == content[offset : offset + size]
            assert windows[window][came:] == b"\7" * (4 * PAGE - came)

        check()
        assert one.reader.read_into(windows[0][:512], one.file, 512 * 1000) == 0
        assert one.reader.cpu_seconds > 0 and not one.told


def test_many_threads_ask_at_once(tmp_path, command):
    content = os.urandom(64 * PAGE)
    (tmp_path / "data").write_bytes(content)
    with Started(tmp_path / "data", command) as one:
        assert one.reader.wait_ready(), one.told
        wrong = []

        def ask(window):
            for turn in range(50):
                offset = (turn * 7 + int(window.nbytes)) % 60 * PAGE
                if one.reader.read_into(window, one.file, offset) != 4 * PAGE:
                    wrong.append(offset)
                if window != content[offset : offset + 4 * PAGE]:
                    wrong.append(offset)

        threads = [threading.Thread(target=ask, args=(window,)) for window in one.reader.windows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and not one.told


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("silent", "what it read is not what stands in the file"),
        ("refused", "its process ended with exit code 1: OSError: 16 MiB of memory cannot be locked"),
    ],
)
def test_a_process_that_does_not_read_is_never_used(tmp_path, fault, line):
    (tmp_path / "data").write_bytes(bytes(PAGE))
    with Started(tmp_path / "data", plain(fault)) as one:
        assert not one.reader.wait_ready() and one.told == [line]


def test_a_program_that_is_not_there_is_said(tmp_path):
    (tmp_path / "data").write_bytes(bytes(PAGE))
    with Started(tmp_path / "data", ["/no/such/program"]) as one:
        assert not one.reader.wait_ready()
        (line,) = one.told
        assert "No such file" in line


def test_a_process_that_does_not_greet_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "START_SECONDS", 0.3)
    (tmp_path / "data").write_bytes(bytes(PAGE))
    with Started(tmp_path / "data", [sys.executable, "-c", "import time; time.sleep(3600)"]) as one:
        assert not one.reader.wait_ready() and one.told == ["it has not begun within 0.3 s"]


def test_it_is_closed_while_it_starts(tmp_path):
    (tmp_path / "data").write_bytes(bytes(PAGE))
    with Started(tmp_path / "data", [sys.executable, "-c", "import time; time.sleep(3600)"]) as one:
        pass
    assert not one.told


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("hangs", "no answer within 0.5 s"),
        ("fails", "2,048 bytes at 0 cannot be read: Input/output error"),
        ("raises", "its process ended with exit code 1: KeyError: 2"),
    ],
)
def test_a_process_that_stops_reading_is_ended_and_told_once(tmp_path, monkeypatch, fault, line):
    monkeypatch.setattr(reader_module, "ASK_SECONDS", 0.5)
    (tmp_path / "data").write_bytes(bytes(PAGE))
    with Started(tmp_path / "data", plain(fault)) as one:
        assert one.reader.wait_ready()
        for _ in range(2):
            with pytest.raises(OSError):
                one.reader.read_into(one.reader.windows[1][:2048], one.file, 0)
            assert not one.reader.ready
            wait(lambda: one.told)
        assert one.told == [line] and not psutil.pid_exists(one.reader._process.pid)


def test_a_read_outside_of_what_it_has_is_refused(tmp_path):
    (tmp_path / "data").write_bytes(bytes(PAGE))
    with Started(tmp_path / "data", plain()) as one, open(tmp_path / "other", "wb+") as other:
        assert one.reader.wait_ready()
        with pytest.raises(OSError, match="Invalid argument"):
            one.reader._ask(other.fileno(), 0, one.reader.windows[0][:512])


@settings(max_examples=50, deadline=None, database=None)
@given(
    st.lists(st.integers(0, (1 << 63) - 1), min_size=5, max_size=5),
    st.lists(st.integers(0, 1 << 20), min_size=8),
)
def test_messages_come_back_as_they_were(five, more):
    ask = ReadAsk(*five)
    assert ReadAsk.unpack(ask.encode()) == ask
    reply = ReadReply(five[0], five[1])
    assert ReadReply.unpack(reply.encode()) == reply
    for size in (0, len(reply.encode()) - 1, len(reply.encode()) + 1):
        with pytest.raises(ValueError, match="bytes in place of"):
            ReadReply.unpack(bytes(size))
    setup = ReaderSetup(*more[:6], tuple(more), tuple(more[:1]))
    assert ReaderSetup.parse(setup.words()) == setup


# ---- under the store


class Served:
    """Workers over a store, read by a process."""

    def __init__(self, folder, command, queue=QUEUE, way=None):
        self.store, self.told = opened(folder), []
        self.workers = DiskWorkers(
            self.store, tell=self.told.append, way=way or Way(queue=queue), command=command
        )
        self.jobs = 0

    def start(self, ready=True):
        self.workers.start()
        if ready:
            assert self.workers._reader.wait_ready(), self.told

    def read(self, chain):
        """The names that came back, each with the right bytes."""
        self.jobs += 1
        coming, came, found = self.workers.read(self.jobs, chain), 0, []
        while came < coming:
            wait(lambda: self.workers.done)
            one = self.workers.done.popleft()
            got = [bytes(one.buffer[at * 1024 : at * 1024 + 700]) for at in range(one.right)]
            assert got == [block_of(name) for name in one.span.names[: one.right]]
            found += one.span.names[: one.right]
            came += len(one.span.names)
            self.workers.return_buffer(one)
        self.workers.end(self.jobs)
        return found

    @property
    def process(self):
        return self.workers._reader._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *failed):
        self.workers.close()


def test_blocks_come_by_the_process(tmp_path, command):
    with Served(tmp_path, command) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start()
        assert one.read(chain) == chain and one.read(chain[4:6]) == chain[4:6] and not one.told
        assert one.workers._reader.ready


def test_what_is_killed_while_it_reads_costs_no_block(tmp_path, command):
    """Reads under way are made again, by threads; one line says so."""
    with Served(tmp_path, command) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start()
        killer = threading.Timer(0.05, os.kill, (one.process, signal.SIGKILL))
        killer.start()
        until = time.monotonic() + 60
        while not one.told:
            assert one.read(chain) == chain and time.monotonic() < until
        killer.join()
        assert one.read(chain) == chain and len(one.told) == 1 and not one.store.dropped
        assert one.told[0].startswith(f"{one.store.folder} is not read by DeepSpeed's asynchronous I/O: ")
        assert "its process ended by SIGKILL" in one.told[0]
        assert "reads it by 2 threads, through the page cache from here on" in one.told[0]


def test_a_process_that_is_stopped_is_waited_for_until_a_deadline(tmp_path, command, monkeypatch):
    monkeypatch.setattr(reader_module, "ASK_SECONDS", 5.0)
    with Served(tmp_path, command) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start()
        os.kill(one.process, signal.SIGSTOP)
        assert one.read(chain) == chain
        wait(lambda: one.told)
        assert "no answer within 5 s" in one.told[0]


def test_a_file_that_is_cut_behind_its_back_ends_only_the_process(tmp_path, command, monkeypatch):
    """What is there of it is read all the same."""
    with Served(tmp_path, command) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start()
        data = one.store.folder / "data"
        os.truncate(data, 5 * 1024)
        monkeypatch.setattr(File, "size_bytes", 9 * 1024)
        assert one.read(chain) == chain[:5]
        monkeypatch.undo()
        wait(lambda: one.told)
        assert "SIGABRT" in one.told[0] and one.store.dropped[DAMAGED] == 4
        assert one.read(chain[:5]) == chain[:5] and len(one.told) == 1


def test_a_cut_file_is_not_asked_for(tmp_path, command):
    with Served(tmp_path, command) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start()
        os.truncate(one.store.folder / "data", 5 * 1024 + 300)
        assert one.read(chain) == chain[:5] and not one.told and one.workers._reader.ready


def test_reads_that_fail_unsaid_give_no_block(tmp_path):
    """DeepSpeed looks at no result of a read: then memory has what was there before."""
    with Served(tmp_path, plain("stale")) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start()
        assert one.read(chain) == [] and one.store.dropped[DAMAGED] > 0


def test_threads_read_until_the_process_is_ready_and_where_it_never_is(tmp_path):
    way = Way(True, 3, QUEUE)
    with Served(tmp_path, plain("refused"), way=way) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start(ready=False)
        assert one.read(chain) == chain
        wait(lambda: one.told)
        assert one.read(chain) == chain and len(one.told) == 1
        assert "cannot be locked; this node reads it by 3 threads, past the page cache from" in one.told[0]


def test_serving_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("afserve.comm.disk.workers.libraries", lambda: None)
    with Served(tmp_path, ()) as one:
        chain = names(*range(9))
        keep(one.store, chain)
        one.start(ready=False)
        assert one.read(chain) == chain
        (line,) = one.told
        assert "it is not built here for this version of torch; this node reads it by 2 threads" in line


class ReaderScene(Scene):
    """As `Scene`, read by a process for each life of the store."""

    def __init__(self, folder, by, command):
        self.command, self.reader = command, None
        super().__init__(folder, by)
        self.begin()

    def begin(self):
        self.reader = DiskReader([self.store.data], QUEUE, 1, 4 * PAGE, self.command)
        self.reader.start()
        assert self.reader.wait_ready()

    def restart(self, capacity):
        self.reader.close()
        super().restart(capacity)
        self.begin()

    def read(self, chain):
        store, (window,) = self.store, self.reader.windows
        found, wanted = [], store.run(names(*chain))
        for span in store.spans(names(*chain), 4 * PAGE):
            came = store.fetch_by(self.reader, span, window)
            if self.by is None:
                right = store.check_read(span, store.in_buffer(span, window), came)
                got = [bytes(window[at * 1024 : at * 1024 + 700]) for at in range(right)]
            else:
                right, got = into_a_cache(_Copies(self.by, store, window, came), _Asked(store), span)
            assert got[:right] == [block_of(name) for name in span.names[:right]]
            found += span.names[:right]
        assert self.harmed or len(found) == wanted


class _Copies:
    """What `into_a_cache` takes for passes: the blocks of a window that was filled before."""

    def __init__(self, by, store, window, came):
        self.by, self.store, self.window, self.came = by, store, window, came


class _Asked:
    def __init__(self, store):
        self.store = store

    def fetch_checked(self, copies, span, memory, window):
        return self.store.copy_checked(copies.by, span, memory, copies.window, copies.came)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
def test_no_wrong_block_whatever_happens_to_the_files(native, command):
    by = passes() if native else None

    examples = 10 if command else 3  # DeepSpeed's process begins with torch

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(actions=ACTIONS)
    def check(actions):
        with tempfile.TemporaryDirectory() as folder:
            scene = ReaderScene(folder, by, command)
            try:
                for what, *arguments in actions:
                    getattr(scene, what)(*arguments)
                    scene.store.check()
                for number in range(41):
                    scene.read([number])
                assert scene.harmed or not scene.store.dropped[DAMAGED]
            finally:
                scene.reader.close()
                scene.store.close()

    check()


# ---- with its parent


@pytest.mark.parametrize("fault", ["none", "hangs"])
def test_it_ends_with_its_parent_however_that_ends(tmp_path, fault):
    (tmp_path / "data").write_bytes(bytes(PAGE))
    code = f"""
        import sys, threading, time
        from pathlib import Path
        from afserve.comm.disk.files import File
        from afserve.comm.disk.reader import ReadQueue, DiskReader
        file = File(Path({str(tmp_path)!r}) / "data")
        reader = DiskReader([file], ReadQueue(2, 4096, 4), 2, 16384, {plain(fault)!r})
        reader.start()
        assert reader.wait_ready()
        ask = lambda: reader.read_into(reader.windows[0][:512], file, 0)
        threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.1)
        print(reader._process.pid, flush=True)
        time.sleep(3600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        gone, _ = psutil.wait_procs([child], 30)
        assert gone, "it outlives its parent"


# ---- measured


def test_it_is_measured_beside_the_threads(tmp_path, command):
    ways = (Way(False, 1), Way(queue=ReadQueue(2, 64 << 10, 4)))
    told = []
    found = measure(tmp_path, 4 << 20, ways, 2, command, told.append)
    assert [one.way for one in found] == list(ways) and not told
    assert all(one.rate > 0 and one.cost > 0 for one in found) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["silent", "fails"])
def test_a_way_that_cannot_be_had_is_left_out_and_said(tmp_path, fault):
    told = []
    found = measure(tmp_path, 1 << 20, (Way(False, 1), Way(queue=QUEUE)), 2, plain(fault), told.append)
    assert [one.way for one in found] == [Way(False, 1)] and len(told) == 1


def test_the_reason_of_a_failed_read_is_told_though_it_is_closed_at_once(tmp_path, monkeypatch):
    """As by `measure`: the thread that tells may be slower than whoever has done with it."""
    (tmp_path / "data").write_bytes(bytes(PAGE))
    file, told = File(tmp_path / "data"), []
    reader = DiskReader([file], QUEUE, QUEUE.asks, QUEUE.piece_bytes, plain("fails"), told.append)
    reader.start()
    assert reader.wait_ready()
    reaped = reader._reaped
    monkeypatch.setattr(reader, "_reaped", lambda: (time.sleep(0.3), reaped())[1])
    with pytest.raises(OSError, match="Input/output error"):
        reader.read_into(reader.windows[0][:512], file, 0)
    reader.close()
    file.close()
    assert len(told) == 1 and "Input/output error" in told[0]


def test_threads_of_a_queue_are_those_that_were_fastest(tmp_path):
    queue = ReadQueue(2, 1 << 20, 8)
    slow, fast = Measured(Way(False, 1), 1e9, 1e-10), Measured(Way(True, 16), 2e9, 1e-10)
    best = Measured(Way(queue=queue), 3e9, 1e-10)
    assert fastest([slow, fast, best]) == Measured(Way(True, 16, queue), 3e9, 1e-10)
    assert fastest([slow, best]).way == Way(False, 1, queue) and fastest([slow, fast]) == fast
    save(tmp_path, fastest([slow, fast, best]))
    assert chosen(tmp_path) == Way(True, 16, queue)
    assert str(chosen(tmp_path)) == "DeepSpeed's asynchronous I/O, 2 x 8 blocks of 1024 KiB at once"
    text = (tmp_path / CHOICE).read_text()
    for old, new in (("1048576", "1048577"), ('"asks": 2', '"asks": 17'), ('"depth": 8', '"depth": "8"')):
        (tmp_path / CHOICE).write_text(text.replace(old, new))
        assert chosen(tmp_path) == Way(True, 16)
    assert Way(queue=queue).piece_bytes == 8 << 20 and Path(CHOICE).name == CHOICE
