"""CPU kernels as ratios to what the same machine reaches in the same run: a streaming read, torch.mm, torch's loop.

python -m bench.kernels --quick                    the first shape only, about a minute
python -m bench.kernels --experts int8,int4/32     only experts kept so (bf16, int8, int4/32, int4/128w)
python -m bench.kernels --save --threads 1,2       everything; rows are kept in bench/results/kernels.jsonl
python -m bench.kernels --states                   only gated delta nets, with transformers' beside them
python -m bench.kernels --device cuda              bench.kernels_cuda
"""

import argparse
import itertools
import json
from collections.abc import Iterator

import torch

from afserve.kernels.native import Native
from afserve.launch.measure.clock import best_of, measure_read, out_of_cache_data
from afserve.launch.measure.experts import WeightKind
from bench.kernels_cases import KINDS, Case, attention_cases, expert_cases, small_cases
from bench.kernels_delta import delta_cases
from bench.origin import ROOT, origin

Row = dict[str, str | int | float]
MM = 2048


def limits(native: Native, threads: int) -> Row:
    """GB/s of a plain read of more than the caches hold, and GFLOP/s of torch.mm in bfloat16."""
    a, b = torch.randn(MM, MM).bfloat16(), torch.randn(MM, MM).bfloat16()
    rate = 2 * MM**3 / best_of(lambda: torch.mm(a, b), 9).best / 1e9
    return {
        "op": "limits",
        "threads": threads,
        "read_gb_s": measure_read(native, out_of_cache_data(native)),
        "mm_gflop_s": rate,
    }


def row(case: Case, limit: Row, threads: int) -> Row:
    """Ratios are of best times; the median and the 90th percentile are beside them."""
    ours = best_of(case.run, case.repeats)
    if case.less is not None:
        ours = ours.less(best_of(case.less, case.repeats).median)
    found: Row = {
        "op": case.op, "case": case.case, "threads": threads,
        "us_best": ours.best * 1e6 / case.calls, "us_median": ours.median * 1e6 / case.calls,
        "us_p90": ours.p90 * 1e6 / case.calls, "repeats": case.repeats,
    }  # fmt: skip
    if case.bytes:
        found["gb_s"] = case.bytes * case.calls / ours.best / 1e9
        found["of_read"] = float(found["gb_s"]) / float(limit["read_gb_s"])
    if case.flops:
        found["gflop_s"] = case.flops * case.calls / ours.best / 1e9
        found["of_mm"] = float(found["gflop_s"]) / float(limit["mm_gflop_s"])
    if case.peer is not None:
        peer = best_of(case.peer, max(2, case.repeats // 2))
        found["peer_us_best"] = peer.best * 1e6 / case.peer_calls
        found["over_peer"] = float(found["peer_us_best"]) / float(found["us_best"])
    if case.share_of is not None:
        whole = best_of(case.share_of, case.repeats)
        found["share_of_layer"] = ours.median / whole.median
    return found


def rows(threads: int, isa: str, quick: bool, kinds: tuple[WeightKind, ...], states: bool) -> Iterator[Row]:
    native = Native(threads, isa)
    torch.set_num_threads(threads)
    limit = limits(native, threads)
    yield limit
    cases: tuple[Iterator[Case], ...] = ()
    if kinds or not states:
        cases += (expert_cases(native, quick, kinds or (KINDS[:1] if quick else KINDS)),)
    if not kinds and not states:
        cases += attention_cases(native, quick), small_cases(native, quick)
    if states or not kinds:
        cases += (delta_cases(native, quick),)
    for case in itertools.chain(*cases):
        yield row(case, limit, threads) | {"isa": native.isa}


def line(found: Row) -> str:
    return "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape of each kind")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help="append to bench/results/kernels.jsonl")
    parser.add_argument("--threads", default="1,2", help="comma-separated thread counts")
    parser.add_argument("--isa", default="", help="an instruction set instead of the best one")
    parser.add_argument("--experts", default="", help="only experts, kept in these ways: bf16, int8, int4/32")
    parser.add_argument("--states", action="store_true", help="only gated delta nets")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if options.device == "cuda":
        from bench import kernels_cuda

        kernels_cuda.main([])
        return
    asked = [name for name in options.experts.split(",") if name]
    kinds = tuple(kind for kind in KINDS if kind.name in asked)
    if len(kinds) != len(asked):
        parser.error(f"--experts: {options.experts}; known: {', '.join(kind.name for kind in KINDS)}")
    known = origin()
    for threads in (int(n) for n in options.threads.split(",")):
        for found in rows(threads, options.isa, options.quick, kinds, options.states):
            print(json.dumps(found) if options.json else line(found), flush=True)
            if options.save:
                with (ROOT / "bench/results/kernels.jsonl").open("a") as file:
                    file.write(json.dumps(found | known) + "\n")


if __name__ == "__main__":
    main()
