"""A pilot on simulated days, beside an oracle, the best fixed sizes and an autoscaler of whole replicas.

    python -m bench.pilot            every row; --case N: one of them; --traces FOLDER; --kept FOLDER; --save

What the pilot is compared with takes most of the time, and no policy changes it: `--kept` takes it from a folder, where
a play before left it, and leaves it there else. It is to be kept only while replay and planner stay as they are.

Lengths are those of the public traces, in their order; arrivals are made by `control/pilot/replay/days` (a cosine over
the day, Gamma-distributed five minutes), or are the trace's own hour. Bursty: 24 bursts a day of twice the rate, five
minutes with a variation of 0.15, times between arrivals of Gamma with a variation of 2.
Stage times are the planner's, of DeepSeek-V3 in FP8 with prompts and decoding on devices of their own that share the
experts. `slower`: what is played takes so many times what the pilot's model says. Nothing is measured of this machine.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from afserve.cli.pilot.replay import DayFlags, ReplayFlags, played
from afserve.cli.pilot.shares import ClassFlags
from afserve.control.pilot.replay.compare import Rivals, rivals_on
from afserve.control.pilot.replay.run import PlayedDay
from afserve.control.pilot.sizes import PoolSizes
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "pilot.jsonl"
TRACES = ROOT.parent / "shared/data/request_traces"
FILES = {"Azure": "AzureLLMInferenceTrace_conv.csv", "Mooncake": "mooncake_conversation_trace.jsonl"}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    trace: str
    flags: dict[str, Any]
    day: dict[str, Any] = field(default_factory=dict)
    classes: str = ""  # a file of classes of service
    shares: str = ""


_HALF = 12.0  # hours: from midnight over the lowest point up to noon
_BURSTY = {"day": _HALF, "bursts": 24.0, "uneven": 0.15, "clumped": 2.0}
_SLOW = {"ttft": "20s", "tpot": "100ms", "tick": 5.0}


def _bursty(trace: str, devices: int, seed: int, **more: Any) -> Case:
    flags = {"pool": f"h200={devices}", "tick": 5.0, **more}
    return Case("half a day, bursty", trace, flags, {**_BURSTY, "seed": seed})


def _classes(name: str, **more: Any) -> Case:
    flags, day = {"pool": "h200=64", "tick": 5.0}, {"day": _HALF, "seed": 6, **more}
    said = "[chat]\npriority = -10\nttft = 1.0\n\n[bulk]\nttft = 30.0\n"
    return Case(name, "Azure", flags, day, said, "chat=0.6,bulk=0.4")


CASES = (
    Case("the hour of the trace", "Azure", {"pool": "h200=32", "times": 4.0}),
    Case("half a day", "Azure", {"pool": "h200=64", "tick": 5.0}, {"day": _HALF, "seed": 5}),
    Case("half a day", "Mooncake", {"pool": "h200=128", **_SLOW}, {"day": _HALF, "seed": 3}),
    Case("half a day", "Azure", {"pool": "h200=512", "tick": 5.0}, {"day": _HALF, "seed": 4}),
    Case("half a day", "Azure", {"pool": "h200=32", "tick": 5.0, "slower": 1.1}, {"day": _HALF, "seed": 1}),
    _bursty("Azure", 32, 11),
    _bursty("Azure", 64, 12),
    _bursty("Azure", 64, 13),
    _bursty("Azure", 64, 14),
    _bursty("Mooncake", 128, 15, **_SLOW),
    _bursty("Azure", 256, 16),
    _bursty("Azure", 512, 17),
    _classes("half a day, two classes"),
    Case("day", "Azure", {"pool": "h200=64", "tick": 5.0}, {"day": 24.0, "seed": 7}),
    Case("day", "Mooncake", {"pool": "h200=128", **_SLOW}, {"day": 24.0, "seed": 8}),
    Case("half a day", "Mooncake", {"pool": "h200=256", **_SLOW}, {"day": _HALF, "seed": 9}),
    _bursty("Azure", 32, 21),
    _bursty("Azure", 64, 22),
    _classes("half a day, two classes, a quiet night", trough=0.05),
)
_DEFAULTS = {
    "model": "deepseek-v3",
    "pool": "h200=64",
    "precision": "fp8",
    "ttft": "2s",
    "tpot": "50ms",
    "times": 1.0,
    "hold": 600.0,
    "start": 20.0,
    "replica_start": 240.0,
    "slower": 1.0,
    "tick": 1.0,
}
_NO_DAY = {
    "day": None,
    "peak": None,
    "trough": 0.3,
    "uneven": 0.08,
    "bursts": 0.0,
    "clumped": None,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class Kept:
    """Rivals of one case, in a file. `folder` None: found anew and kept nowhere."""

    folder: Path | None
    number: int

    def __call__(self, *asked: Any) -> Rivals:
        file = None if self.folder is None else self.folder / f"{self.number}.json"
        if file is not None and file.exists():
            return _read(json.loads(file.read_text(encoding="utf-8")))
        found = rivals_on(*asked)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return found


def _read(values: dict[str, Any]) -> Rivals:
    oracle, fixed, replicas = (_day(values[name]) for name in ("oracle", "fixed", "replicas"))
    return Rivals(oracle, fixed, replicas, PoolSizes(*values["unit"]), PoolSizes(*values["first"]))


def _day(values: dict[str, Any]) -> PlayedDay:
    changes = tuple((at, PoolSizes(*sizes)) for at, sizes in values["changes"])
    return PlayedDay(**{**values, "changes": changes})


def row(number: int, traces: Path, kept: Path | None) -> dict[str, Any]:
    case = CASES[number]
    asked = ReplayFlags(trace=traces / FILES[case.trace], **{**_DEFAULTS, **case.flags})
    with TemporaryDirectory() as folder:
        file = Path(folder) / "classes.toml"
        file.write_text(case.classes)
        classes = ClassFlags(file, case.shares) if case.classes else ClassFlags(None, None)
        day = DayFlags(**{**_NO_DAY, **case.day})
        found = played(asked, day, classes, Kept(kept, number))
    return {"case": case.name, "trace": case.trace, **case.day, **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pilot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder of the traces")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="where rivals of a case are kept")
    parser.add_argument("--save", action="store_true", help=f"append to {OUT.relative_to(ROOT)}")
    asked = parser.parse_args()
    for number in range(len(CASES)) if asked.case is None else (asked.case,):
        found = row(number, asked.traces, asked.kept)
        print(json.dumps(found), flush=True)
        if asked.save:
            with OUT.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**origin(), **found}) + "\n")


if __name__ == "__main__":
    main()
