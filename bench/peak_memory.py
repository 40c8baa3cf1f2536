"""The most memory that processes had, by the system's own counts, sampled from outside. It knows no benchmark."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

EVERY_S = 0.02


@dataclass(slots=True)
class Peak:
    """Bytes. `own` is what only memory can hold (anonymous and shared pages); `resident` counts pages of mapped files
    too, which the system can drop at any time."""

    own: int = 0
    resident: int = 0


@dataclass(slots=True)
class PeakMemory:
    """Of a process and all below it, each by its pid, from `with` to its end. `together`: the most that all had at once
    of their own. Pages that a fork shares with its parent count in both."""

    root: int
    of: dict[int, Peak] = field(default_factory=dict)
    together: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "PeakMemory":
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.look()

    def look(self) -> None:
        """One sample."""
        total = 0
        for pid in _below(self.root):
            found = memory_of(pid)
            if found is None:
                continue
            peak = self.of.setdefault(pid, Peak())
            peak.own, peak.resident = max(peak.own, found.own), max(peak.resident, found.resident)
            total += found.own
        self.together = max(self.together, total)


def memory_of(pid: int) -> Peak | None:
    """Now, and for `resident` the most so far. None for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    sizes = {
        name: int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem", "VmHWM") if name in lines
    }
    if len(sizes) < 3:  # it has ended and was not waited for
        return None
    return Peak(sizes["RssAnon"] + sizes["RssShmem"], sizes["VmHWM"])


def _below(root: int) -> list[int]:
    try:
        process = psutil.Process(root)
        return [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
