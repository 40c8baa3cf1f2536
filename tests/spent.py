"""Seconds of a core that each test takes, with those of the processes below it: `make durations`.

A plugin (`-p tests.spent`), also in workers: what a test spends goes along with its last report. What several tests use
counts for the first that asks for it. Beside others a second of a core does less.
"""

import os
import resource
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

NAME, MOST = "seconds of a core", 60
_TICKS = os.sysconf("SC_CLK_TCK")
_begun = pytest.StashKey[float]()


def spent() -> float:
    """By this process, by those below it, and by those that it has waited for."""
    uses = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in uses) + sum(map(_spent_by, _below(os.getpid())))


def _below(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(listed).split():
            yield int(child)
            yield from _below(int(child))


def _spent_by(pid: int) -> float:
    """Itself and those that it has waited for."""
    times = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / _TICKS


def _read(path: Path) -> str:
    """Nothing of a process that has just ended."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_begun] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "teardown":
        item.user_properties.append((NAME, spent() - item.stash[_begun]))
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                seconds = dict(report.user_properties).get(NAME, 0.0)
                files[report.nodeid.partition("::")[0]] += seconds
                tests[report.nodeid] += seconds
    terminalreporter.write_line(f"{sum(tests.values()):.0f} {NAME}")
    for counted in (files, tests):
        terminalreporter.write_sep("-", f"most {NAME}")
        for name, seconds in counted.most_common(MOST):
            terminalreporter.write_line(f"{seconds:8.2f}  {name}")
