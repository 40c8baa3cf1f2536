"""`python -m bench.kernels_cuda`: Triton kernels against the chip's own limits and torch's best kernels.

Copy bandwidth and matrix rates are measured in the same run. Rows go to `results/kernels_cuda.jsonl`; without a CUDA
device it prints "not measured" and writes nothing. `--tiles` prints the fastest expert tiles instead, in the form
`kernels/triton_config.py` wants them.
"""

import argparse
import json
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.cuda_clock import Case, Clock, Limits, measure_limits

ROOT = Path(__file__).parent.parent


def row_of(case: Case, limits: Limits, clock: Clock) -> dict[str, object]:
    times = clock.seconds(case.run)
    bound, median = limits.seconds(case), statistics.median(times)
    row: dict[str, object] = {
        "op": case.op, "case": case.case, "us_median": 1e6 * median, "us_p10": 1e6 * times[len(times) // 10],
        "us_p90": 1e6 * times[-1 - len(times) // 10], "repeats": len(times), "bytes": case.bytes, "flops": case.flops,
        "us_bound": 1e6 * bound, "of_bound": bound / median, "of_copy": case.bytes / limits.copy / median,
    }  # fmt: skip
    if case.peer is not None:
        peer = statistics.median(clock.seconds(case.peer))
        row |= {"peer": "torch", "peer_us_median": 1e6 * peer, "peer_ratio": peer / median}
    return row


def stamp(device: torch.device, limits: Limits) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "machine": torch.cuda.get_device_name(device), "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
        "copy_GB_s": limits.copy / 1e9, "bf16_TFLOP_s": limits.bf16 / 1e12,
        "fp8_TFLOP_s": limits.fp8 / 1e12,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true", help="search expert tiles, write no rows")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "kernels_cuda.jsonl")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: no CUDA device")
        return
    from bench.cuda_cases import cases, print_tiles  # needs triton

    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    clock, has_fp8 = Clock(device, arguments.repeats), torch.cuda.get_device_capability(device) >= (8, 9)
    if arguments.tiles:
        print_tiles(device, clock, has_fp8)
        return
    limits = measure_limits(device, clock)
    known = stamp(device, limits)
    print(json.dumps(known))
    for case in cases(device, has_fp8):
        row = row_of(case, limits, clock)
        print(
            f"{case.op:16} {case.case:28} {row['us_median']:10.1f} us  {row['of_bound']:.0%} of bound",
            flush=True,
        )
        with arguments.out.open("a") as out:
            out.write(json.dumps(row | known) + "\n")


if __name__ == "__main__":
    main()
