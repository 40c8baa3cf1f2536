"""Every published row as the `afserve plan` arguments that a person would type, judged on the JSON that is printed.

    python -m bench.planner_typed [--data ../shared/data/planner]     # prints; bench.planner writes the rows

Three things are judged: which side the verdict takes where a system measured or chose one, the tokens per second where
a system published them, and the times of served rows that the shipped profiles were not fitted to.
"""

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from afserve.cli.main import run
from afserve.cli.plan.catalog import read_lines
from afserve.placement.planner.perf.trace_reader import read_trace
from bench.planner_public import DEEPSEEK, FASTAFD, STEP3, WIDE
from bench.planner_served import ServedRow

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared/data/planner"
PRICES = {"h800": 5.28, "a800": 2.26, "h20": 1.85, "l20": 1.0, "l40s": 1.08}
"""MegaScale-Infer's own. Step-3's, which the hardware files carry, make an A800 cheaper than an H20."""
TRACES = {"Azure": "AzureLLMInferenceTrace_conv.csv", "Mooncake": "mooncake_conversation_trace.jsonl"}


@dataclass(frozen=True, slots=True)
class Typed:
    """One command. afd_won: which side was measured to be better, or was chosen. speed: tokens per second and device
    as published, 0 where none is. chosen: hardware of both halves, where that was published. note: what the source
    leaves open."""

    case: str
    line: tuple[str, ...]
    afd_won: bool | None = None
    speed: float = 0.0
    chosen: tuple[str, str] | None = None
    note: str = ""


def say(line: Sequence[str]) -> dict[str, object]:
    """What `afserve plan LINE --json` prints. Raises RuntimeError with the line where it refuses."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run(["plan", *line, "--json"])
    if code:
        raise RuntimeError(f"afserve plan {' '.join(line)}: exit status {code}")
    answer: dict[str, object] = json.loads(printed.getvalue())
    return answer


def verdicts(data: Path) -> Iterator[Typed]:
    """FastAFD's eight, Step-3's four, DeepSeek's three, MegaScale's three."""
    for case, model, context, ranks, _, _, speed, base in FASTAFD:
        wide = {devices: found for devices, _, found in WIDE[case]}
        for devices, rival in ((4, base), (16, wide[16])):
            line = (
                f"--model {model} --pool gb200={ranks + 4} --context {context} --engine fastafd --engine vllm "
                f"--attention-devices {ranks} --expert-devices 4 --devices {devices} --objective device"
            )
            yield Typed(f"FastAFD {case} against vLLM EP{devices}", tuple(line.split()), speed > rival)
    for case, context, ranks, width, _ in STEP3:
        line = (
            f"--model step-3 --pool h800={ranks + 16} --context {context} --kv-precision fp8 "
            f"--attention-precision {width} --tpot 50ms --engine step-3"
        )
        yield Typed(f"Step-3 {case}", tuple(line.split()), True)
    yield from deepseek(data)
    pools = " ".join(f"--pool {name}=32@{price}" for name, price in PRICES.items())
    for model, context in (("mixtral-8x22b", 730), ("mixtral-8x22b", 4096), ("dbrx", 730)):
        line = (
            f"--model {model} {pools} --context {context} --tpot 150ms --precision bf16 --skew 0.16 "
            "--engine megascale"
        )
        yield Typed(f"MegaScale {model} at {context}", tuple(line.split()), True, chosen=("h20", "l40s"))


def deepseek(data: Path) -> Iterator[Typed]:
    """EP128 at 4K, profiled with even routing; EP144 at 21 tokens per second and request, lengths that vary as in
    either request trace."""
    plain = "--model deepseek-v3 --pool h800=144 --engine deepseek"
    yield Typed("DeepSeek EP128 4K", tuple(f"{plain} --context 4096 --skew 0 --tpot 55ms".split()), False)
    for name, spread in spreads(data).items():
        yield Typed(f"DeepSeek EP144, {name} lengths", (*plain.split(), *spread, "--tpot", "47.6ms"), False)


def spreads(data: Path) -> dict[str, tuple[str, ...]]:
    """Flags for a mean context of 4,989 tokens that varies as in each trace; answers of 1,000 tokens."""
    found: dict[str, tuple[str, ...]] = {}
    for name, file in TRACES.items():
        work = read_trace(file, read_lines(data.parent / "request_traces" / file, "trace"))
        deviation = round(4989 * work.context_deviation / work.context_mean)
        lengths = ("--input", f"lognormal 4489 {deviation}", "--output", "1000")
        found[name] = (*lengths, "--decode-only", "--redundant", "32")
    return found


def absolutes(data: Path) -> Iterator[Typed]:
    """The published layouts and requests in flight."""
    for case, model, context, ranks, ours, theirs, speed, base in FASTAFD:
        head = f"--model {model} --pool gb200={ranks + 4} --context {context}"
        line = (
            f"{head} --engine fastafd --kind afd --attention-devices {ranks} --expert-devices 4 "
            f"--micro-batches 2 --concurrency {ours * ranks}"
        )
        yield Typed(f"FastAFD {case}", tuple(line.split()), speed=speed)
        for devices, each, rival in ((4, theirs, base), *WIDE[case]):
            line = (
                f"--model {model} --pool gb200={devices} --context {context} --engine vllm --kind colocated "
                f"--devices {devices} --tensor-parallel 1 --concurrency {each * devices}"
            )
            yield Typed(f"vLLM {case} EP{devices}", tuple(line.split()), speed=rival)
    for case, context, ranks, width, speed in STEP3:
        line = (
            f"--model step-3 --pool h800={ranks + 16} --context {context} --kv-precision fp8 --engine step-3 "
            f"--attention-precision {width} --kind afd --attention-devices {ranks} --expert-devices 16 "
            "--micro-batches 3 --concurrency 6144"
        )
        yield Typed(f"Step-3 {case}", tuple(line.split()), speed=speed)
    for case, devices, context, each, speed in DEEPSEEK:
        line = (
            f"--model deepseek-v3 --pool h800={devices} --context {context} --skew 0 --engine deepseek "
            f"--kind colocated --devices {devices} --micro-batches 2 --concurrency {each * devices}"
        )
        yield Typed(f"DeepSeek {case}", tuple(line.split()), speed=speed)
    plain = "--model deepseek-v3 --pool h800=144 --engine deepseek --kind colocated --devices 144"
    for name, spread in spreads(data).items():
        words = (*plain.split(), *spread, "--tpot", "47.6ms")
        note = "the mean of a day in production, with its quiet hours; lengths vary there as nobody says"
        yield Typed(f"DeepSeek EP144, {name} lengths", words, speed=1850.0, note=note)


def consumer() -> Iterator[Typed]:
    """One RTX 5090 for attention and four DGX Sparks for experts against vLLM on the Sparks (mimo26f-afd)."""
    note = "measured with drafts that differ and with prompts in the rate; planned without"
    for streams in (1, 6, 16):
        line = (
            "--model mimo-v2-flash --pool rtx-5090=1 --pool dgx-spark=4 --precision fp4 --attention-precision fp8 "
            "--kv-precision fp8 --context 1024 --attention-devices 1 --expert-devices 4 --devices 4 "
            f"--expert-slices --objective latency --concurrency {streams} --engine vllm --engine fastafd"
        )
        yield Typed(
            f"one RTX 5090 beside four DGX Sparks, {streams} streams", tuple(line.split()), True, note=note
        )


def judged_verdict(typed: Typed) -> dict[str, object]:
    found = say(typed.line)
    chance = found["probability_afd_better"]
    assert isinstance(chance, float) and typed.afd_won is not None
    best = found["best"]
    assert isinstance(best, dict)
    hardware = (best["attention"]["hardware"], best["experts"]["hardware"])
    return {
        "claim": "verdict as typed",
        "case": typed.case,
        "line": " ".join(typed.line),
        "afd_won": typed.afd_won,
        "probability_afd": chance,
        "right_side": chance if typed.afd_won else round(1 - chance, 3),
        "hardware": " + ".join(hardware),
        "chosen_right": typed.chosen is None or hardware == typed.chosen,
        "note": typed.note,
    }


def judged_speed(typed: Typed) -> dict[str, object]:
    best = say(typed.line)["best"]
    assert isinstance(best, dict)
    speed = float(best["tok_s_per_device"])
    return {
        "claim": "speed as typed",
        "case": typed.case,
        "line": " ".join(typed.line),
        "published": typed.speed,
        "predicted": speed,
        "error": round(speed / typed.speed - 1, 4),
        "limit": 0.15,
        "passed": abs(speed / typed.speed - 1) <= 0.15,
        "counted": True,
        "note": f"tok/s per device{': ' * bool(typed.note)}{typed.note}",
    }


def summary(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """The figures that verdicts are held against."""
    sides = [float(str(row["right_side"])) for row in rows]
    return {
        "claim": "verdicts as typed",
        "case": "all",
        "rows": len(sides),
        "at_least_0.6": sum(side >= 0.6 for side in sides),
        "wrong_above_0.7": sum(side < 0.3 for side in sides),
        "brier": round(sum((1 - side) ** 2 for side in sides) / len(sides), 4),
        "hardware_right": sum(bool(row["chosen_right"]) for row in rows),
    }


def typed_row(row: ServedRow, engine: str) -> tuple[str, ...]:
    """A served configuration as flags; `engine` is a name or a profile's file."""
    offered = max(row.devices, row.prefill_devices if row.disaggregated else 0)
    line = (
        f"--model {row.shape.name} --pool {row.chip.name}={offered} --engine {engine} --kind colocated "
        f"--precision {row.experts} --attention-precision {row.weights} --kv-precision {row.kv} "
        f"--devices {row.devices} --tensor-parallel {1 if row.data_parallel else row.devices} "
        f"--concurrency {row.concurrency:g} --input {row.prompt:g} --output {row.answer:g}"
    ).split()
    if not row.expert_parallel:
        line.append("--expert-slices")
    if row.limit < row.concurrency:
        line += ["--max-running", f"{row.limit:g}"]
    if row.disaggregated:
        workers = row.prefill_workers / row.decode_workers
        line += ["--decode-only", "--prefill-workers", f"{workers:g}"]
        if row.prefill_devices:
            line += ["--prefill-devices", str(row.prefill_devices)]
    return tuple(line)


def published(data: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(verdicts with their summary, speeds)."""
    sides = [judged_verdict(typed) for typed in verdicts(data)]
    others = [judged_verdict(typed) | {"claim": "consumer row as typed"} for typed in consumer()]
    return [*sides, *others, summary(sides)], [judged_speed(typed) for typed in absolutes(data)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    sides, speeds = published(parser.parse_args().data)
    for row in sides[:-1]:
        print(f"{row['right_side']:.2f} {row['case']} ({row['hardware']})")
    print(json.dumps(sides[-1]))
    for row in speeds:
        print(f"{row['error']:+.1%} {row['case']}: {row['predicted']} against {row['published']}")


if __name__ == "__main__":
    main()
