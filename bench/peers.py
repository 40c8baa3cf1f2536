"""afserve beside transformers, vLLM and llama.cpp: generated tokens per second on one checkpoint, in one run.

    python -m bench.peers --model DIR [--vllm-python PY] [--llama-bench BIN --gguf FILE] [--save]

Every engine is started once and stays; at each batch they take turns, `--rounds` times, so that a machine that slows
down slows all of them. vLLM runs in a Python of its own (its torch differs) and twice: as it comes, with one core kept
for its front end, and told to compute on all. llama.cpp runs as `llama-batched-bench` on the same weights as GGUF.
Before a turn all are left alone for 1.5 s. Rates are of the steady state: prompts processed, nobody finished. Ratios
are by round. `--prefill 512,2048,3500` adds prompts of such lengths, one at a time: tokens of the prompt by the time to
the first token, the median of three behind one that is not measured, since the first of a length touches memory that
nobody has used.

    python -m bench.peers --model DIR --expert-dtype int4 --dense-dtype int4 --llama-bench BIN --gguf FILE \
        --gguf-type Q4_0 [--save]

compares few bits: our routed experts in int4 or int8 and, with `--dense-dtype`, all other linear maps, beside
llama.cpp with every matrix in Q4_0 or Q8_0. Its embeddings are in few bits too, ours and both routers are not.

`--isa avx2` limits afserve to an instruction set, and `--llama-isa avx2` says for which one llama.cpp was built; rows
name both. Both limited to AVX2 is how a machine with more measures what one without it has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from afserve.config import AUTO, EXPERT_DTYPES, ISAS
from afserve.kernels.isa import check_isa, used_isa
from bench.origin import origin
from bench.peers_worker import PROMPTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "peers.jsonl"
OURS = ("colocated", "afd 1x1")
WORKER_SECONDS = 900
SETTLE_SECONDS = 1.5  # before a turn: vLLM takes about 1 s of CPU time after its answer
PHASES = ("batch", "prefill")  # the options that have their sizes


class Engine(Protocol):
    name: str

    def rate(self, batch: int, seed: int) -> float:
        """Generated tokens per second of `batch` sequences together."""
        ...

    def prefill(self, prompt: int, seed: int) -> float:
        """Tokens per second of one prompt of `prompt` tokens."""
        ...

    def close(self) -> None: ...


class Worker:
    """A process that answers {"batch", "seed"} and {"prefill", "seed"} lines with {"rate"} lines; its first line says
    that it is ready."""

    def __init__(
        self, name: str, command: Sequence[str], env: dict[str, str] | None = None, suffix: str = ""
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        ready = self._read()
        self.name = ready.get("name", name) + suffix

    def rate(self, batch: int, seed: int) -> float:
        return self._ask({"batch": batch, "seed": seed})

    def prefill(self, prompt: int, seed: int) -> float:
        return self._ask({"prefill": prompt, "seed": seed})

    def _ask(self, asked: dict[str, int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._read()["rate"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.name}: ended with exit code {self._process.wait()}")


class Llama:
    """One short process per measurement: it starts in less than a second."""

    def __init__(
        self, program: str, gguf: str, prompt: int, output: int, threads: int, kind: str = ""
    ) -> None:
        self.name = f"llama.cpp {kind}".rstrip()
        self._lengths = prompt, output
        self._command = [
            program, "-m", gguf, "-c", "16384", "-b", "2048", "-ub", "512",
            "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl",
        ]  # fmt: skip

    def rate(self, batch: int, seed: int) -> float:
        return self._run("speed_tg", *self._lengths, [batch])[0]

    def prefill(self, prompt: int, seed: int) -> float:
        return statistics.median(self._run("speed_pp", prompt, 1, [1] * (1 + PROMPTS))[1:])

    def _run(self, figure: str, prompt: int, output: int, batches: list[int]) -> list[float]:
        """One after another."""
        asked = ["-npp", str(prompt), "-ntg", str(output), "-npl", ",".join(map(str, batches))]
        done = subprocess.run(
            [*self._command, *asked], capture_output=True, text=True, check=True, timeout=WORKER_SECONDS
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return [float(row[figure]) for row in rows]

    def close(self) -> None:
        """Nothing stays."""


def main() -> None:
    options = _options()
    sizes = [(phase, int(size)) for phase in PHASES for size in getattr(options, phase).split(",") if size]
    with ExitStack() as stack:
        engines = _engines(options)
        for engine in engines:
            stack.callback(engine.close)
        for phase, size in sizes:
            rows = _measure(engines, phase, size, options)
            for row in rows:
                print(json.dumps(row) if options.json else _line(row), flush=True)
            if options.save:
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)


def _engines(options: argparse.Namespace) -> list[Engine]:
    case = [
        str(Path(options.model).resolve()),
        str(options.prompt_len),
        str(options.output_len),
        str(options.threads),
    ]
    longest = str(max([0, *(int(size) for size in options.prefill.split(",") if size)]))
    kept, dense = options.expert_dtype, options.dense_dtype
    as_stored = (
        kept == "auto" and not options.gguf_type
    )  # of an unfolded GGUF file transformers would compute in floats
    names, suffix = (
        ((*OURS, "transformers"), "") if as_stored else (OURS, "" if kept == "auto" else f" {kept}")
    )
    suffix += "" if dense == "auto" else f" dense {dense}"
    engines: list[Engine] = [
        Worker(
            name,
            [sys.executable, "-m", "bench.peers_worker", name, *case, kept, dense, options.isa],
            suffix=suffix,
        )
        for name in names
    ]
    if options.vllm_python:
        script = str(ROOT / "bench" / "peers_vllm.py")
        preload = {"LD_PRELOAD": options.vllm_preload} if options.vllm_preload else {}
        # -P: this folder holds a kernels.py, which vLLM's dependencies would take for the package of that name.
        command = [options.vllm_python, "-P", script, *case, longest]
        engines.append(Worker("vllm", command, preload))
        # As it comes, vLLM keeps one core for its front end; on two cores that is half of them.
        whole = {**preload, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        engines.append(Worker("vllm", command, whole, " on all cores"))
    if options.llama_bench:
        lengths = (options.prompt_len, options.output_len)
        engines.append(Llama(options.llama_bench, options.gguf, *lengths, options.threads, options.gguf_type))
    return engines


def _measure(
    engines: Sequence[Engine], phase: str, size: int, options: argparse.Namespace
) -> list[dict[str, object]]:
    """`size`: sequences together, or tokens of one prompt."""
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for seed in range(options.rounds):
        for engine in engines:
            ask = engine.rate if phase == "batch" else engine.prefill
            time.sleep(SETTLE_SECONDS)
            rates[engine.name].append(ask(size, seed))
    decodes = phase == "batch"
    rows = []
    for name, values in rates.items():
        ratios = {
            other: round(statistics.median(a / b for a, b in zip(values, theirs, strict=True)), 3)
            for other, theirs in rates.items()
            if name.startswith(OURS) and not other.startswith(OURS)
        }
        rows.append(
            {
                "bench": "peers", "model": Path(options.model).name, "engine": name,
                "batch": size if decodes else 1, "phase": "decode" if decodes else "prefill",
                "tokens_per_second": round(statistics.median(values), 1), "low": round(min(values), 1),
                "high": round(max(values), 1), "ratio": ratios, "rounds": options.rounds,
                "prompt_len": options.prompt_len if decodes else size,
                "output_len": options.output_len if decodes else 1, "threads": options.threads,
                "experts": options.expert_dtype, "dense": options.dense_dtype,
                "llama_isa": options.llama_isa if options.llama_bench else "",
                "load": round(os.getloadavg()[0], 1), **origin(), "isa": used_isa(options.isa),
            }
        )  # fmt: skip
    return rows


def _line(row: dict[str, object]) -> str:
    spread = f"{row['low']} to {row['high']}"
    rate = f"{row['tokens_per_second']:>9} tok/s"
    what = f"batch {row['batch']:>3}" if row["phase"] == "decode" else f"prompt {row['prompt_len']:>4}"
    return f"{what}  {row['engine']:<26} {rate}  ({spread})  {row['ratio'] or ''}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint folder (bench.make_checkpoint makes one)")
    parser.add_argument("--batch", default="1,8,32,64", help="sequences that decode together")
    parser.add_argument("--prefill", default="", help="lengths of prompts, such as 512,2048,3500")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the whole engine"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM for CPUs")
    parser.add_argument("--vllm-preload", help="LD_PRELOAD for it: tcmalloc and libiomp5")
    parser.add_argument("--llama-bench", help="llama.cpp's llama-batched-bench")
    parser.add_argument("--gguf", help="the same weights as GGUF, in bf16 unless --gguf-type says otherwise")
    parser.add_argument(
        "--gguf-type", default="", help="what the GGUF is quantised to, for its name: Q4_0, Q8_0"
    )
    parser.add_argument("--expert-dtype", default="auto", choices=EXPERT_DTYPES, help="of afserve's experts")
    parser.add_argument(
        "--dense-dtype", default="auto", choices=EXPERT_DTYPES, help="of afserve's other linear maps"
    )
    parser.add_argument("--isa", default=AUTO, choices=(AUTO, *ISAS), help="what afserve computes with")
    parser.add_argument(
        "--llama-isa", default="native", help="what llama.cpp was built for: native, avx2; for its rows"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if bool(options.llama_bench) != bool(options.gguf):
        parser.error("--llama-bench and --gguf go together")
    check_isa(options.isa)
    return options


if __name__ == "__main__":
    main()
