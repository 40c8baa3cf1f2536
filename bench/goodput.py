"""Goodput of four ways to serve prompts and decoding on equal GPUs, simulated on real arrivals.

    python -m bench.goodput                  every row; --case N: one of them; --requests N; --save

`shared experts`: prefill and decode nodes use one pool of expert devices. `on every device`: each device has an expert
node, and a prefill or a decode node. `P/D`: prefill and decode instances, each with a copy of the experts. `mixed`:
instances that decode and read prompts in chunks. Expert nodes compute prompts in pieces of rows, as the engine does (on
GPUs seldom: it knows the time of launches only); of experts, as it does on CPUs where reading them costs much; or at a
GPU's tiles, which it does nowhere. Stage times are the planner's, fitted to measured kernels of H200, and the same for
all four. That decoding goes first on a device that reads prompts too, after the piece that runs, is assumed and not
measured. Nothing is measured of this machine. Of each layout, and for each way of cutting, splits, chunk sizes, sizes
of instances and ranks are searched (`search_phases`), and the best one is its row; the share of prefill is swept.
Goodput: the highest rate at which 90 % of the requests meet both targets. Prefixes are not reused.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afserve.cli.catalog import load_curves, load_hardware, load_model, read_lines
from afserve.config import EngineSettings
from afserve.engine.pieces import OVERHEAD, PIECE_SECONDS
from afserve.placement.planner.hardware import Hardware
from afserve.placement.planner.perf_attention import Precision
from afserve.placement.planner.perf_experts import Routing
from afserve.placement.planner.phase_stages import Pieces
from afserve.placement.planner.phase_tables import Tables
from afserve.placement.planner.search_phases import (
    HOSTED,
    MIXED,
    SHARED,
    TWO_COPIES,
    Load,
    Pool,
    described,
    search,
)
from afserve.placement.planner.setting import Setting
from afserve.placement.planner.simulate_phases import Asked, Targets
from afserve.placement.planner.trace_reader import read_trace
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "goodput.jsonl"
TRACES = ROOT.parent / "shared/data/request_traces"
FLOOR = EngineSettings().prompt_share
BY_ROWS = Pieces(PIECE_SECONDS, OVERHEAD, FLOOR, by_rows=True)
BY_EXPERTS = Pieces(PIECE_SECONDS, OVERHEAD, FLOOR, by_rows=False, whole_experts=True)
_TILE = 2 * 128 * 128 * 7168  # FLOP of a tile of 128 x 128 over DeepSeek-V3's hidden size
_SHARE = 0.6 / 132  # of an H200's peak that one of its multiprocessors reaches


def at_tiles(chip: Hardware) -> Pieces:
    """26 us on an H200, and longer where a chip computes less."""
    return Pieces(_TILE / (_SHARE * chip.flops("fp8")), OVERHEAD, FLOOR, by_rows=False)


@dataclass(frozen=True, slots=True)
class Case:
    """Arrivals of a trace, targets in seconds, and how many devices there are."""

    trace: str
    targets: Targets
    chip: str
    devices: int
    model: str = "deepseek-v3"


FILES = {"Azure": "AzureLLMInferenceTrace_conv.csv", "Mooncake": "mooncake_conversation_trace.jsonl"}
TIGHT, MIDDLE, LOOSE, LONG = Targets(1.0, 0.03), Targets(1.0, 0.05), Targets(2.0, 0.1), Targets(30.0, 0.1)
QWEN = "qwen3-235b-a22b"
CASES = (
    *(
        Case(trace, targets, chip, devices)
        for chip, devices in (
            ("h200", 16),
            ("h200", 32),
            ("h200", 64),
            ("h100", 24),
            ("h100", 32),
            ("h20", 16),
        )
        for trace, targets in (("Azure", MIDDLE), ("Azure", LOOSE), ("Mooncake", LONG))
    ),
    Case("Azure", TIGHT, "h200", 16),
    Case("Azure", MIDDLE, "h200", 24),
    *(
        Case("Azure", targets, chip, devices, QWEN)
        for chip, devices in (("h200", 8), ("h800", 8), ("h800", 16), ("h20", 8))
        for targets in (TIGHT, MIDDLE)
    ),
    Case("Mooncake", LONG, "h800", 16, QWEN),
    Case("Mooncake", LONG, "h20", 8, QWEN),
)


def setting(model: str = "deepseek-v3") -> Setting:
    shape, chip, widths = load_model(model), load_hardware("h200"), Precision(kv="bf16")
    trace = read_trace("none", ["arrival_s,input_tokens,output_tokens", "0,1,1"])
    return Setting(
        shape, load_curves("h200", shape, chip, widths), trace, precision=widths, routing=Routing(0.4)
    )


def tables(name: str) -> Tables:
    return Tables(setting(), load_hardware(name))


def read(path: Path) -> list[Asked]:
    work = read_trace(path.name, read_lines(path, "trace"))
    together = zip(work.arrival, work.prompt, work.answer, strict=True)
    return [Asked(float(at), int(prompt), int(answer)) for at, prompt, answer in together]


def rows(case: Case, load: Load) -> Iterator[dict[str, object]]:
    """The best of each layout, beside the others."""
    chip = load_hardware(case.chip)
    pool, tiles = Pool.of(setting(case.model), chip, case.devices), at_tiles(chip)
    every = {}
    for kind, name in ((SHARED, "shared"), (HOSTED, "shared on every device")):
        for cut, how in (("at tiles", tiles), ("of rows", BY_ROWS), ("of experts", BY_EXPERTS)):
            every[f"{name}, pieces {cut}"] = search(kind, pool, load, how)
    for kind in (TWO_COPIES, MIXED):
        every[kind] = search(kind, pool, load, tiles)
    best = {name: next(iter(found.values()), None) for name, found in every.items()}
    rate = {name: found.rate if found else 0.0 for name, found in best.items()}
    for name, found in best.items():
        by_share = {str(reads): round(one.rate, 2) for reads, one in sorted(every[name].items())}
        yield {
            "model": case.model,
            "trace": case.trace,
            "chip": case.chip,
            "devices": case.devices,
            "ttft_s": case.targets.ttft,
            "tpot_s": case.targets.tpot,
            "requests": len(load.asked),
            "layout": name,
            "best": "does not fit" if found is None else described(found.layout),
            "requests_s": round(rate[name], 2),
            "of_two_copies": ratio(rate[name], rate[TWO_COPIES]),
            "of_mixed": ratio(rate[name], rate[MIXED]),
            "by_prefill_devices": by_share if len(by_share) > 1 else {},
        }


def ratio(rate: float, other: float) -> float | None:
    return round(rate / other, 2) if other else None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder of the traces")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument(
        "--requests", type=int, help="that are played, the first ones of the trace; 100 for each device"
    )
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    if options.requests is not None and options.requests < 300:
        parser.error(f"--requests {options.requests}: fewer than 300 tell little of a tenth that may be late")
    known = origin()
    for case in CASES if options.case is None else (CASES[options.case],):
        played = options.requests or 100 * case.devices
        load = Load(read(options.traces / FILES[case.trace])[:played], case.targets)
        for row in rows(case, load):
            print(
                json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True
            )
            if options.save:
                with Path(options.save).open("a") as file:
                    file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
