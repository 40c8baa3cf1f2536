"""Tests beside each other: `pytest --workers 3` forks workers, each of which takes file after file.

They are forked from one process that has imported what most tests import, and a file is collected by the worker that
runs it: to collect all takes half a minute of a core, and is done once. Reports go to the first process, a line of JSON
each. A worker that dies costs the test that it ran; another one goes on behind it.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import IO, Any, TypeGuard

import pytest
from _pytest.runner import collect_one_node

from tests.warm.process import code_of

SECONDS = 60.0  # for a worker that is told to end
SOON = 0.005  # seconds of a setup that nobody asks after: `--durations` shows none that is shorter
_NUMBER = 2  # bytes of a file's number
_encode = json.JSONEncoder().encode  # while a test has replaced `json.dumps`, too


def _is_apart(known: logging.Logger | logging.PlaceHolder) -> TypeGuard[logging.Logger]:
    return isinstance(known, logging.Logger) and not known.propagate


def files_among(nodes: Sequence[pytest.Item | pytest.Collector]) -> Iterator[pytest.Item | pytest.Collector]:
    """Those of folders, which are looked through and not imported; a single test that is asked for is as a file."""
    for node in nodes:
        if isinstance(node, pytest.Directory):
            found = collect_one_node(node)
            node.ihook.pytest_collectreport(report=found)
            yield from files_among(found.result if found.passed else [])
        else:
            yield node


def order_of(file: pytest.Item | pytest.Collector) -> tuple[bool, str]:
    """Files with tests marked `slow` first, so that none of them is waited for at the end. The rest by their names:
    rooms that wait and rooms that compute then are beside each other."""
    return "mark.slow" not in file.path.read_text(encoding="utf-8"), file.path.name


@dataclass
class Worker:
    """As the first process knows it."""

    pid: int
    ended: int  # a descriptor that can be read then; a pipe may be open in processes that a test has left
    pipe: int
    unread: bytes = b""
    file: int | None = None  # that it has taken
    test: str | None = None  # that it has begun


class Beside:
    """The plugin."""

    def __init__(self, workers: int, imported: Sequence[str] = ()) -> None:
        """`imported`: modules that most tests need, beside what conftest.py files import."""
        self._workers, self._imported = workers, imported
        self._files: list[pytest.Item | pytest.Collector] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        for name in self._imported:
            importlib.import_module(name)
        for logger in filter(_is_apart, logging.root.manager.loggerDict.values()):
            # Or pytest gives each of torch's sixty its handlers and takes them, six times a test.
            logger.propagate = True
        session.perform_collect(genitems=False)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item | pytest.Collector]) -> None:
        """At first these are files and folders. Later they are one file's tests, in a worker."""
        if self._files is None:
            self._files = sorted(files_among(items), key=order_of)
            items.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        Loop(session, self._files or []).run(self._workers)
        return True


class Loop:
    """The first process while the others run tests."""

    def __init__(self, session: pytest.Session, files: Sequence[pytest.Item | pytest.Collector]) -> None:
        self._session, self._files, self._hook = session, files, session.config.hook
        self._temporary: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._queue, end = os.pipe()
        os.write(end, b"".join(number.to_bytes(_NUMBER) for number in range(len(files))))
        os.close(end)
        self._living: dict[int, Worker] = {}  # by pid
        self._forked = self._taken = self._told = 0
        self._done: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def run(self, workers: int) -> None:
        try:
            for _ in range(min(workers, len(self._files))):
                self._fork(None)
            while self._living:
                for key, _ in self._selector.select():
                    worker: Worker = key.data
                    if worker.pid in self._living:
                        self._read(worker)
                        if key.fd == worker.ended:
                            self._bury(worker)
            assert len(self._done) == len(self._files), "a worker has lost a file"
        finally:
            self._end()
            os.close(self._queue)

    def _fork(self, resumed: tuple[int, str] | None) -> None:
        """Another worker, which goes on behind a test of a file, if one is named."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        folder = self._temporary / f"worker-{self._forked}"
        self._forked += 1
        pid = os.fork()
        if pid == 0:
            os.close(read)
            work = Work(self._session, self._files, os.getppid(), write)
            os._exit(code_of(lambda: work.run(self._queue, resumed, folder)))
        os.close(write)
        worker = self._living[pid] = Worker(pid, os.pidfd_open(pid), read)
        self._selector.register(worker.ended, selectors.EVENT_READ, worker)
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def _read(self, worker: Worker) -> None:
        """All that has come."""
        while True:
            try:
                chunk = os.read(worker.pipe, 1 << 20)
            except BlockingIOError:
                return
            if not chunk:
                if worker.pipe in self._selector.get_map():
                    self._selector.unregister(worker.pipe)
                return
            *lines, worker.unread = (worker.unread + chunk).split(b"\n")
            for line in lines:
                self._take(worker, json.loads(line))

    def _take(self, worker: Worker, said: Mapping[str, Any]) -> None:
        match said:
            case {"file": number}:
                worker.file, self._taken = number, self._taken + 1
            case {"done": number}:
                worker.file = None
                self._done.add(number)
            case {"test": name}:  # how many there are is not known: as many as files so far let expect
                worker.test, self._told = name, self._told + 1
                self._session.testscollected = max(1, self._told * len(self._files) // max(1, self._taken))
            case {"report": data}:
                if isinstance(data["longrepr"], list):  # why a test is skipped; JSON has no tuples
                    data["longrepr"] = tuple(data["longrepr"])
                config = self._session.config
                self._report(self._hook.pytest_report_from_serializable(config=config, data=data))
                if data.get("when") == "teardown":
                    worker.test = None

    def _report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if isinstance(report, pytest.CollectReport):
            self._hook.pytest_collectreport(report=report)
        else:
            self._hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                self._hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _bury(self, worker: Worker) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self._forget(worker)
        if code == 0:
            return
        if worker.file is None:
            name = "the end of a worker"
        elif worker.test is None:
            name = self._files[worker.file].nodeid
            self._done.add(worker.file)
            self._fork(None)
        else:
            name = worker.test
            self._fork((worker.file, name))
        why = f"the worker has ended with {code}"
        self._report(pytest.TestReport(name, (name, None, name), {}, "failed", why, "call"))

    def _forget(self, worker: Worker) -> None:
        for descriptor in (worker.ended, worker.pipe):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
        del self._living[worker.pid]

    def _end(self) -> None:
        """Workers that still run are told to end, as by Ctrl-C, and killed where they do not."""
        for pid in self._living:
            os.kill(pid, signal.SIGINT)
        until = time.monotonic() + SECONDS
        for worker in list(self._living.values()):
            with selectors.DefaultSelector() as waiting:
                waiting.register(worker.ended, selectors.EVENT_READ)
                if not waiting.select(max(0.0, until - time.monotonic())):
                    os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            self._forget(worker)


class Work:
    """A worker's whole life."""

    def __init__(
        self,
        session: pytest.Session,
        files: Sequence[pytest.Item | pytest.Collector],
        parent: int,
        pipe: int,
    ) -> None:
        self._session, self._files, self._parent = session, files, parent
        self._pipe: IO[str] = open(pipe, "w", encoding="utf-8")  # noqa: SIM115  until this process ends

    def run(self, queue: int, resumed: tuple[int, str] | None, folder: Path) -> None:
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # what the first process's end is for
        config, plugins = self._session.config, self._session.config.pluginmanager
        folder.mkdir()
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        capture: Any = plugins.getplugin("capturemanager")
        if capture is not None:  # whose files the others write to as well
            capture.stop_global_capturing()
            capture.start_global_capturing()
        plugins.register(Relay(self, plugins.unregister(name="terminalreporter")), "terminalreporter")
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(self):
            if resumed is not None:
                self._run_file(*resumed)
            while number := os.read(queue, _NUMBER):
                self._run_file(int.from_bytes(number), None)

    def close(self) -> None:
        """What was made for all files ends."""
        self._session._setupstate.teardown_exact(None)

    def _run_file(self, number: int, behind: str | None) -> None:
        self.say(file=number)
        items = self._session.items = self._collected(self._files[number])
        tests = iter(items)
        if behind is not None:
            tests = dropwhile(lambda item: item.nodeid != behind, tests)
            next(tests)
        for item, following in pairwise([*tests, self._session]):
            if os.getppid() != self._parent:
                os._exit(1)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self.say(done=number)

    def _collected(self, file: pytest.Item | pytest.Collector) -> list[pytest.Item]:
        gc.disable()
        try:
            items = list(self._session.genitems(file))
            config = self._session.config
            config.hook.pytest_collection_modifyitems(session=self._session, config=config, items=items)
            return items
        finally:
            gc.enable()

    def say(self, **words: Any) -> None:
        """What has been reported since goes along."""
        self._tell(words)
        self._pipe.flush()

    def report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        config = self._session.config
        self._tell({"report": config.hook.pytest_report_to_serializable(config=config, report=report)})

    def _tell(self, words: Mapping[str, object]) -> None:
        self._pipe.write(_encode(words) + "\n")


class Relay:
    """In a worker, in place of what writes on the terminal."""

    def __init__(self, work: Work, terminal: Any) -> None:
        self._work = work
        self._tw = terminal._tw  # where a test takes too long, stacks are written on it

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._work.say(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "setup" or not report.passed or report.duration > SOON:
            self._work.report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            self._work.report(report)
