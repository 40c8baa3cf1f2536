"""Goodput of three ways to serve prompts and decoding on equal GPUs, simulated on real arrivals.

    python -m bench.goodput                  every row; --case N: one of them; --quick: shorter runs; --save: keep them

`shared`: prefill and decode nodes use one pool of expert devices. `P/D`: prefill and decode instances, each with a copy
of the experts. `mixed`: one kind of instance that decodes and reads prompts in chunks. The model is DeepSeek-V3 in FP8;
stage times are the planner's, fitted to measured kernels of H200, and the same for all three. Nothing is measured of
this machine. H100 are asked too, where two copies of the experts take most of the memory. Of each layout every split,
chunk size and size of instance is tried, and the best one is its row; the share of prefill is swept. Goodput: the
highest rate at which 90 % of the requests meet both targets. Prefixes are not reused.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afserve.cli.catalog import load_curves, load_hardware, load_model, read_lines
from afserve.engine.pieces import FLOOR, OVERHEAD, PIECE_SECONDS
from afserve.placement.planner.perf_attention import Precision
from afserve.placement.planner.perf_experts import Routing
from afserve.placement.planner.phase_stages import Apart, Pieces, Tables, Together
from afserve.placement.planner.setting import Setting
from afserve.placement.planner.simulate_phases import Asked, Layout, Targets, goodput
from afserve.placement.planner.trace_reader import read_trace
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "goodput.jsonl"
TRACES = ROOT.parent / "shared/data/request_traces"
BY_ROWS = Pieces(PIECE_SECONDS, OVERHEAD, FLOOR, by_rows=True)
AT_TILES = Pieces(PIECE_SECONDS, OVERHEAD, FLOOR, by_rows=False)
CHUNKS = (1024, 4096)  # tokens of a rank that only reads prompts
MIXED_CHUNKS = (64, 128, 256, 512, 1024, 2048)
NODE = 8


@dataclass(frozen=True, slots=True)
class Case:
    """Arrivals of a trace, targets in seconds, and how many devices there are."""

    trace: str
    file: str
    targets: Targets
    chip: str
    devices: int


AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"
CASES = tuple(
    Case(name, file, targets, chip, devices)
    for chip, devices in (("h200", 16), ("h200", 32), ("h100", 24))
    for name, file, targets in (
        ("Azure", AZURE, Targets(1.0, 0.05)),
        ("Azure", AZURE, Targets(2.0, 0.1)),
        ("Mooncake", MOONCAKE, Targets(30.0, 0.1)),
    )
)


def tables(name: str) -> Tables:
    shape, chip, widths = load_model("deepseek-v3"), load_hardware(name), Precision(kv="bf16")
    trace = read_trace("none", ["arrival_s,input_tokens,output_tokens", "0,1,1"])
    setting = Setting(
        shape, load_curves("h200", shape, chip, widths), trace, precision=widths, routing=Routing(0.4)
    )
    return Tables(setting, chip)


def shared(stages: Tables, devices: int) -> Iterator[tuple[int, Layout]]:
    """(devices that only read prompts, layout)."""
    for experts in (6, 8) if devices <= 2 * NODE else (8, 12, 16):
        for reads in _splits(devices - experts):
            decodes = devices - experts - reads
            for chunk in CHUNKS:
                yield (
                    reads,
                    Layout(
                        chunk,
                        reads=(Apart(stages, reads, experts),),
                        decodes=(Apart(stages, decodes, experts),),
                        pieces=AT_TILES,
                    ),
                )


def two_copies(stages: Tables, devices: int) -> Iterator[tuple[int, Layout]]:
    """Either side is one instance, or several of a node."""
    for reads in range(NODE - 1, devices - NODE + 2):
        decodes = devices - reads
        if reads % NODE and devices > 2 * NODE:
            continue
        for first in _instances(stages, reads):
            for second in _instances(stages, decodes):
                for chunk in CHUNKS:
                    yield reads, Layout(chunk, reads=first, decodes=second, first_there=True)


def mixed(stages: Tables, devices: int) -> Iterator[tuple[int, Layout]]:
    for both in _instances(stages, devices):
        for chunk in MIXED_CHUNKS:
            yield 0, Layout(chunk, both=both)


def _splits(devices: int) -> Iterator[int]:
    """About six of them."""
    step = max(1, round(devices / 7))
    yield from range(step, devices, step)


def _instances(stages: Tables, devices: int) -> Iterator[tuple[Together, ...]]:
    yield (Together(stages, devices),)
    if devices > NODE and devices % NODE == 0:
        yield (Together(stages, NODE),) * (devices // NODE)


def sweep(
    found: Iterator[tuple[int, Layout]], asked: Sequence[Asked], targets: Targets, seconds: float
) -> dict[int, tuple[float, Layout]]:
    """The best goodput for each number of devices that only read prompts."""
    best: dict[int, tuple[float, Layout]] = {}
    for reads, layout in found:
        if any(pool.kv_tokens <= 0 for pool in (*layout.both, *layout.reads, *layout.decodes)):
            continue
        known = best[reads][0] if reads in best else 0.0
        rate = goodput(layout, asked, targets, above=known, seconds=seconds)
        if rate > known or reads not in best:
            best[reads] = rate, layout
    return best


def cut_by_rows(found: dict[int, tuple[float, Layout]]) -> Iterator[tuple[int, Layout]]:
    """The same layouts with expert nodes' pieces as they are now."""
    for reads, (_, layout) in found.items():
        yield reads, replace(layout, pieces=BY_ROWS)


def read(path: Path) -> list[Asked]:
    work = read_trace(path.name, read_lines(path, "trace"))
    together = zip(work.arrival, work.prompt, work.answer, strict=True)
    return [Asked(float(at), int(prompt), int(answer)) for at, prompt, answer in together]


def rows(case: Case, asked: Sequence[Asked], stages: Tables, seconds: float) -> Iterator[dict[str, object]]:
    """The best of each layout, beside the two others."""

    def swept(found: Iterator[tuple[int, Layout]]) -> dict[int, tuple[float, Layout]]:
        return sweep(found, asked, case.targets, seconds)

    at_tiles = swept(shared(stages, case.devices))
    every = {
        "shared, pieces at tiles": at_tiles,
        "shared, pieces of rows": swept(cut_by_rows(at_tiles)),
        "P/D, two copies": swept(two_copies(stages, case.devices)),
        "mixed, chunked prefill": swept(mixed(stages, case.devices)),
    }
    best = {
        name: max(found.values(), key=lambda one: one[0], default=(0.0, None))
        for name, found in every.items()
    }
    for name, (rate, layout) in best.items():
        by_share = {str(reads): round(one[0], 2) for reads, one in sorted(every[name].items())}
        yield {
            "trace": case.trace,
            "chip": case.chip,
            "devices": case.devices,
            "ttft_s": case.targets.ttft,
            "tpot_s": case.targets.tpot,
            "layout": name,
            "best": "does not fit" if layout is None else described(layout),
            "requests_s": round(rate, 2),
            "of_two_copies": ratio(rate, best["P/D, two copies"][0]),
            "of_mixed": ratio(rate, best["mixed, chunked prefill"][0]),
            "by_prefill_devices": by_share if len(by_share) > 1 else {},
        }


def described(layout: Layout) -> str:
    """Devices and chunk."""
    if layout.both:
        return f"{len(layout.both)} x {layout.both[0].ranks}, chunks of {layout.chunk}"
    reads, decodes = layout.reads, layout.decodes
    sides = f"prefill {len(reads)} x {reads[0].ranks}, decode {len(decodes)} x {decodes[0].ranks}"
    experts = f", experts {reads[0].experts}" if isinstance(reads[0], Apart) else ""
    return f"{sides}{experts}, chunks of {layout.chunk}"


def ratio(rate: float, other: float) -> float | None:
    return round(rate / other, 2) if other else None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder of the traces")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--quick", action="store_true", help="15 s of arrivals, not 60")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    known, seconds = origin(), 15.0 if options.quick else 60.0
    for case in CASES if options.case is None else (CASES[options.case],):
        asked = read(options.traces / case.file)
        for row in rows(case, asked, tables(case.chip), seconds):
            print(
                json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True
            )
            if options.save:
                with Path(options.save).open("a") as file:
                    file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
