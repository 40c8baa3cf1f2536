"""How long `afserve up` takes to serve a large model, and the memory that it takes meanwhile, role by role.

    python -m bench.start --model DIR                      # a checkpoint: from the disk, then as the page cache has it
    python -m bench.start --model deepseek-v3 --dummy --layers 4 -- --expert-dtype int4

Flags after `--` go to `afserve up`. A checkpoint's bytes over the seconds to ready stand beside what the disk and the
page cache give to plain reads of the same files in the same run; the seconds that the bundled nano takes stand beside
both, for what is not loading. Memory is sampled until a request has been answered twice, with the same text.
"""

import argparse
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from bench.file_reads import cache_speed, disk_speed, forget
from bench.origin import ROOT, origin
from bench.peak_memory import PeakMemory
from bench.served import Served, started

OUT = ROOT / "bench" / "results" / "start.jsonl"
GIB, MIB = 1 << 30, 1 << 20
MOST_READ = 3 * GIB  # of the files, for each plain read
READY_S = 900.0
TOKENS = 32
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the command to ready, bytes of memory by node, and what it then answered."""

    ready_s: float
    own: dict[str, int]
    resident: dict[str, int]
    together: int
    answer_s: float


def start(model: str, flags: list[str]) -> Start:
    """Raises RuntimeError where it does not become ready, or answers a greedy request in two ways."""
    begin = time.perf_counter()
    with started("--model", model, *flags) as here, PeakMemory(here.process.pid) as peaks:
        here.wait_ready(READY_S)
        ready = time.perf_counter() - begin
        first, _ = _answer(here)
        again, seconds = _answer(here)
        if first != again:
            raise RuntimeError(f"two answers to one greedy request: {first!r} and {again!r}")
        peaks.look()
        names = {node["pid"]: str(node["name"]) for node in _status(here)["nodes"]}
        found = {names.get(pid, "the rest"): peak for pid, peak in peaks.of.items() if pid in names}
        return Start(
            ready,
            {name: peak.own for name, peak in found.items()},
            {name: peak.resident for name, peak in found.items()},
            peaks.together,
            seconds,
        )


def _status(here: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{here.url}/status", headers=here.admin).raise_for_status().json()
    return found


def _answer(here: Served) -> tuple[str, float]:
    """The text of TOKENS greedy tokens, and the seconds that they took."""
    model = str(_status(here)["models"][0])
    asked = {
        "model": model,
        "prompt": list(range(5, 37)),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    begin = time.perf_counter()
    answer = httpx.post(f"{here.url}/v1/completions", json=asked, timeout=300.0).raise_for_status().json()
    seconds = time.perf_counter() - begin
    if answer["usage"]["completion_tokens"] != TOKENS:
        raise RuntimeError(f"{answer['usage']['completion_tokens']} tokens instead of {TOKENS}")
    return str(answer["choices"][0]["text"]), seconds


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row, or of a checkpoint one from the disk and one with the page cache as it then is."""
    bare = start("nano", [])
    if options.dummy:
        flags = ["--load-format", "dummy", *(["--layers", str(options.layers)] if options.layers else [])]
        yield _row(options, "random", start(options.model, [*flags, *options.flags]), bare)
        return
    files = sorted(Path(options.model).glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{options.model}: no .safetensors file; name a checkpoint folder, or give --dummy")
    size = sum(path.stat().st_size for path in files)
    most = min(MOST_READ, size)
    speeds = {"disk_gb_s": disk_speed(files, most) / 1e9, "cache_gb_s": cache_speed(files, most) / 1e9}
    for what in ("disk", "page cache"):
        if what == "disk":
            forget(files)
        yield {**_row(options, what, start(options.model, options.flags), bare), "bytes": size, **speeds}


def _row(options: argparse.Namespace, what: str, found: Start, bare: Start) -> Row:
    return {
        "bench": "start",
        "model": options.name or Path(options.model).name,
        "from": what,
        "layers": options.layers,
        "flags": " ".join(options.flags),
        "ready_s": found.ready_s,
        "nano_ready_s": bare.ready_s,
        "own_mib": {name: round(size / MIB) for name, size in found.own.items()},
        "resident_mib": {name: round(size / MIB) for name, size in found.resident.items()},
        "together_mib": round(found.together / MIB),
        "tok_s": TOKENS / found.answer_s,
        **origin(),
    }


def _show(row: Row) -> None:
    memory = ", ".join(
        f"{name} {own:,} ({row['resident_mib'][name]:,} with mapped files)"
        for name, own in row["own_mib"].items()
    )
    print(
        f"{row['model']} from {row['from']}: ready in {row['ready_s']:.1f} s (nano {row['nano_ready_s']:.1f} s)"
    )
    if "bytes" in row:
        rate = row["bytes"] / row["ready_s"] / 1e9
        print(
            f"  {row['bytes'] / 1e9:.1f} GB, {rate:.2f} GB/s to ready; plain reads: disk {row['disk_gb_s']:.2f}, "
            f"page cache {row['cache_gb_s']:.2f} GB/s"
        )
    print(
        f"  peak MiB: {memory}; all at once {row['together_mib']:,}; then {row['tok_s']:.1f} tok/s",
        flush=True,
    )


def _end(number: int, frame: FrameType | None) -> None:
    """Whoever ends this ends what it has started too."""
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint folder, or with --dummy a bundled name")
    parser.add_argument("--name", help="what the rows call it; the folder's name if not given")
    parser.add_argument("--dummy", action="store_true", help="random weights, made at the start")
    parser.add_argument("--layers", type=int, help="with --dummy: only the first N layers")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="for `afserve up`")
    options = parser.parse_args()
    if options.layers and not options.dummy:
        parser.error("--layers is for --dummy: a checkpoint is loaded whole")
    signal.signal(signal.SIGTERM, _end)
    for row in measure(options):
        _show(row)
        if options.save:
            with Path(options.save).open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
