"""`python -m bench.kernels_cuda`: Triton kernels against the chip's own limits and torch's best kernels.

python -m bench.kernels_cuda                  rows of every group of ops, appended to bench/results/kernels_cuda.jsonl
python -m bench.kernels_cuda --only experts   of one group
python -m bench.kernels_cuda --search         the fastest tiles found, into kernels/triton/tiles.json

Copy bandwidth and matrix rates are measured in the same run. Without a CUDA device it prints "not measured" and
writes nothing.
"""

import argparse
import json
from pathlib import Path

import torch

from afserve.kernels.devices.cuda import count_gpus, numbered
from bench.origin import ROOT

GROUPS = ("mla", "experts", "linear", "gqa", "prefill", "states", "small")
LOST = 3  # exit status of a process whose device answers no more
OUT = ROOT / "bench" / "results" / "kernels_cuda.jsonl"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not count_gpus():
        print("not measured: no CUDA device")
        return 0
    if options.search:
        from bench.cuda_search import search_device

        return search_device(options.tiles, options.minutes, options.only)
    return rows(options.only or GROUPS, options.out, options.repeats, options.failures)


def rows(groups: tuple[str, ...] | list[str], out: Path, repeats: int, failures: bool) -> int:
    """Measure whole groups in this process. What failed is printed, and written with `failures`."""
    from afserve.kernels.triton.backend import TritonBackend  # needs triton
    from bench.cuda_cases import groups as all_groups
    from bench.cuda_clock import Clock, measure_limits
    from bench.cuda_rows import DeviceLost, Row, measure, stamp

    device = numbered(torch.device("cuda"))
    ops, clock = TritonBackend.open(device), Clock(device, repeats)
    limits = measure_limits(device, clock)
    known = stamp(device) | {
        "copy_GB_s": limits.copy / 1e9, "bf16_TFLOP_s": limits.bf16 / 1e12, "fp8_TFLOP_s": limits.fp8 / 1e12,
        "clock": clock.place,
    }  # fmt: skip
    print(json.dumps(known), flush=True)

    def write(row: Row) -> None:
        print(line(row), flush=True)
        if "error" in row and not failures:
            return
        with out.open("a") as file:
            file.write(json.dumps(row | {"group": group} | known) + "\n")

    planned = all_groups(ops)
    for group in groups:
        try:
            measure(planned[group], limits, clock, write, device)
        except DeviceLost as error:
            print(f"the device was lost: {error}")
            return LOST
    return 0


def line(row: dict[str, object]) -> str:
    if "error" in row:
        return f"{row['case']:45} {row['error']}"
    peer = f"{row['peer_ratio']:6.2f} x torch" if "peer_ratio" in row else ""
    name = f"{row['op']} {row['case']}"
    share = f"{row['of_bound']:4.0%} of bound  {row['of_copy']:4.0%} of copy"
    return f"{name:45} {row['us_median']:10.1f} us  {share}{peer}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels_cuda", description="Triton kernels on a GPU"
    )
    parser.add_argument("--search", action="store_true", help="search tiles, write no rows")
    parser.add_argument("--only", action="append", choices=GROUPS, help="one group; may be repeated")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=9.0, help="what --search may take")
    parser.add_argument("--failures", action="store_true", help="rows for cases that failed too")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tiles", type=Path, default=ROOT / "kernels" / "triton" / "tiles.json")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
