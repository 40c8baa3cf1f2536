"""Steady-state decoding of afserve, colocated or not, with transformers beside it: tokens per second, time to first
token and per token, start-up, memory.

`python -m bench.decode --model DIR --save` appends to bench/results/decode.jsonl.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from afserve.cli.bench.case import Case
from afserve.cli.bench.figures import figures
from afserve.cli.bench.ours import WARM_UP, Shape, run_batch
from afserve.config import AUTO
from afserve.doors.llm import LLM
from afserve.kernels.isa import ISAS, check_isa
from afserve.member import Role
from bench.decode_rows import HEAD, BenchRow, line, peak_mib, record
from bench.rows import RESULTS, ROOT, table

SAVED = RESULTS / "decode.jsonl"
ENGINES = ("afd", "colocated", "transformers")


def measure(case: Case, shape: Shape) -> Iterator[BenchRow]:
    """One row per batch size, all on one start."""
    llm = shape.llm(case)
    begin = time.perf_counter()
    with llm:
        ready = time.perf_counter() - begin
        run_batch(llm, case, WARM_UP, seed=-1)
        for batch in case.batches:
            runs = [figures(run_batch(llm, case, batch, seed)) for seed in range(case.repeats)]
            deployment, engine = llm.topology.deployment, llm.topology.deployment.engine
            yield BenchRow.of_runs(
                batch,
                runs,
                engine="colocated" if shape.colocated else "afd",
                start_to_ready=ready,
                peak_mib=_peaks(llm),
                nodes=f"{deployment.count(Role.ATTENTION)}x{deployment.count(Role.EXPERT)}",
                micro_batches="auto" if engine.adaptive else str(engine.micro_batches),
                threads=engine.threads,
            )


def _peaks(llm: LLM) -> dict[str, float | None]:
    """MiB of each node's process on this machine, and of this one, which is the gateway."""
    found = {str(node): llm.run.processes.pid_of(node) for node in llm.topology.deployment.nodes}
    return {name: peak_mib(pid) for name, pid in found.items() if pid is not None} | {"gateway": peak_mib()}


def peer(case: Case) -> list[BenchRow]:
    from bench.decode_peer import measured_alone

    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        return apart.submit(measured_alone, case).result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--model", default="nano", help="a checkpoint folder")
    parser.add_argument("--batch", default="1,8,32,64", help="sequences at a time")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each batch; medians are shown")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="all of them if not given")
    parser.add_argument("--attention", type=int, help="attention nodes")
    parser.add_argument("--experts", type=int, help="expert nodes")
    parser.add_argument("--micro-batches", default="auto", help="in flight per attention node")
    parser.add_argument("--threads", type=int, help="per node, and of transformers")
    parser.add_argument("--isa", default=AUTO, choices=(AUTO, *ISAS), help="what afserve computes with")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {SAVED.relative_to(ROOT)}")
    options = parser.parse_args()
    check_isa(options.isa)
    sizes = options.prompt_len, options.output_len, options.repeats
    batches = tuple(map(int, options.batch.split(",")))
    case = Case(options.model, batches, *sizes, options.threads, options.isa)
    nodes = options.attention, options.experts, options.micro_batches
    measured: dict[str, Callable[[], Iterable[BenchRow]]] = {
        "afd": lambda: measure(case, Shape(False, *nodes)),
        "colocated": lambda: measure(case, Shape(True, options.attention)),
        "transformers": lambda: peer(case),
    }
    shown = []
    for name in options.engine or ENGINES:
        for row in measured[name]():
            shown.append(line(row))
            print(f"{row.engine}, batch {row.batch}: done", flush=True)
            if options.save:
                with SAVED.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record(row, case)) + "\n")
    print(table(HEAD, shown))


if __name__ == "__main__":
    main()
