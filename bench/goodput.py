"""Goodput of four ways to serve prompts and decoding on equal GPUs, simulated on real arrivals.

    python -m bench.goodput                  every row; --case N: one of them; --layout NAME; --requests N; --save

`shared experts`: prefill and decode nodes use one pool of expert devices. `on every device`: each device has an expert
node, and a prefill or a decode node. `P/D`: prefill and decode instances, each with a copy of the experts. `mixed`:
instances that decode and read prompts in chunks. Expert nodes compute prompts as the engine does on GPUs: a call is
cut at its thread blocks, of which decoding waits for two in a layer (`pieces_on_gpu`). Stage times are the planner's,
fitted to measured kernels of H200, and the same for all four. That decoding goes first on a device that reads prompts
too is assumed and not measured. Nothing is measured of this machine. Of each layout splits, chunk sizes, sizes of
instances and ranks are searched (`search_phases`), and the best one is its row; the share of prefill is swept.
Goodput: the highest rate at which 90 % of the requests meet both targets. Prefixes are not reused.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model, read_lines
from afserve.config import EngineSettings
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.trace_reader import read_trace
from afserve.placement.planner.simulate.phase_stages import pieces_on_gpu
from afserve.placement.planner.simulate.phase_tables import StageTables
from afserve.placement.planner.simulate.phases import GoodputTargets
from afserve.placement.planner.simulate.search_phases import (
    HOSTED,
    MIXED,
    SHARED,
    TWO_COPIES,
    PhasePool,
    PlayedLoad,
    described,
    search,
)
from afserve.placement.planner.simulate.station import SimulatedRequest
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "goodput.jsonl"
TRACES = ROOT.parent / "shared/data/request_traces"
FLOOR = EngineSettings().prompt_share
LAYOUTS = {"shared": SHARED, "shared on every device": HOSTED, TWO_COPIES: TWO_COPIES, MIXED: MIXED}


@dataclass(frozen=True, slots=True)
class Case:
    """Arrivals of a trace, targets in seconds, and how many devices there are."""

    trace: str
    targets: GoodputTargets
    chip: str
    devices: int
    model: str = "deepseek-v3"


FILES = {"Azure": "AzureLLMInferenceTrace_conv.csv", "Mooncake": "mooncake_conversation_trace.jsonl"}
TIGHT, MIDDLE, LOOSE, LONG = (
    GoodputTargets(1.0, 0.03),
    GoodputTargets(1.0, 0.05),
    GoodputTargets(2.0, 0.1),
    GoodputTargets(30.0, 0.1),
)
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


def tables(name: str) -> StageTables:
    return StageTables(setting(), load_hardware(name))


def read(path: Path) -> list[SimulatedRequest]:
    work = read_trace(path.name, read_lines(path, "trace"))
    together = zip(work.arrival, work.prompt, work.answer, strict=True)
    return [SimulatedRequest(float(at), int(prompt), int(answer)) for at, prompt, answer in together]


def rows(case: Case, load: PlayedLoad, layouts: Sequence[str]) -> Iterator[dict[str, object]]:
    """The best of each layout."""
    chip, asked = load_hardware(case.chip), setting(case.model)
    pool = PhasePool.from_question(asked, chip, case.devices)
    pieces = pieces_on_gpu(chip, asked.shape.hidden, asked.precision.experts, FLOOR)
    for name in layouts:
        every = search(LAYOUTS[name], pool, load, pieces)
        found = next(iter(every.values()), None)
        by_share = {str(reads): round(one.rate, 2) for reads, one in sorted(every.items())}
        yield {
            "model": case.model,
            "trace": case.trace,
            "chip": case.chip,
            "devices": case.devices,
            "ttft_s": case.targets.ttft,
            "tpot_s": case.targets.tpot,
            "requests": len(load.asked),
            "layout": name,
            "piece_us": round(1e6 * pieces.seconds, 1),
            "best": "does not fit" if found is None else described(found.layout),
            "requests_s": round(found.rate if found else 0.0, 2),
            "by_prefill_devices": by_share if len(by_share) > 1 else {},
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder of the traces")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="only this one; may be repeated")
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
        load = PlayedLoad(read(options.traces / FILES[case.trace])[:played], case.targets)
        for row in rows(case, load, options.layout or tuple(LAYOUTS)):
            print(
                json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True
            )
            if options.save:
                with Path(options.save).open("a") as file:
                    file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
