"""`python -m bench.draft_off [--save]`: what the code of drafts costs a run that drafts nothing.

The engine as it is beside the engine without what its steps do for drafts alone: a copy of the package from which these
lines are taken out (`TAKEN_OUT`; a line that is not there once ends the run). A third one is as it is, too, and says
how far two equal ones are apart. Each is a colocated node of the bundled model in a process of its own with one thread;
they decode the same prompts in turns, `--rounds` times in each of `--starts` starts, because processes differ by where
their memory lies. A turn's time is the median of its steps. The answers of a turn have to be the same tokens.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results" / "draft_off.jsonl"
AS_IT_IS, TWIN, WITHOUT = "as it is", "as it is, again", "without"
_PROMPT = 16  # tokens
_LEAST = 40  # steps of a turn
_MICRO_BATCH, _SCHEDULER = "engine/micro_batch.py", "engine/scheduling/scheduler.py"

TAKEN_OUT: tuple[tuple[str, str, str], ...] = (
    (
        _MICRO_BATCH,
        """            asked = self._drafting is not None and self._drafting.due()
            if self._drafting is not None and asked:
                decoding, room = self._scheduler.decoding(self.index), self._scheduler.step_tokens
                self._drafting.propose(decoding, room, self._meter.now)
                since = self._meter.now()
""",
        "",
    ),
    (
        _MICRO_BATCH,
        """            follower = self._follower if self._follower is not None and self._follower.awake else None
            every_row = follower is not None and follower.reads_rows
            step = build_step(self.plan, pool.block_size, self._buffers, pool.further, every_row=every_row)
""",
        "            step = build_step(self.plan, pool.block_size, self._buffers, pool.further)\n",
    ),
    (
        _MICRO_BATCH,
        """            drafted = sum(chunk.supposed for chunk in self.plan.chunks)
            told = {"drafted": drafted, "accepted": outcome.accepted_drafts} if drafted else NO_ARGS
            self._meter.did(self.index, "sample", since, told)
            runs = _drawn(self.plan, outcome.accepted)
            passes, since = 0.0, self._meter.now()
            if follower is not None:
                yield from follower.follow(self.plan, step, x_RH, runs)
                passes = (self._meter.now() - since) / follower.passes
            verified = self._book(self.plan, outcome)
            self.decode_only, self.ran = step.decodes == step.tokens, None
            if self._drafting is not None and not step.ahead:
                seconds = self._meter.now() - began - passes
                if asked or passes:
                    ran = RanStep(step.tokens, drafted, seconds, mixed=not self.decode_only)
                    self.ran = ran._replace(passes=passes, verified=verified)
                else:
                    self._drafting.rest_step(seconds)
""",
        """            self._meter.did(self.index, "sample", since)
            self._book(self.plan, outcome)
            self.decode_only = step.decodes == step.tokens
""",
    ),
    (_MICRO_BATCH, " - 1 - plan.chunks[index].supposed for", " - 1 for"),
    (_MICRO_BATCH, "any(chunk.supposed or chunk.sequence", "any(chunk.sequence"),
    (_MICRO_BATCH, "sequence, row, plan.chunks[index].supposed)", "sequence, row)"),
    (
        _MICRO_BATCH,
        """        drafted = [index for index, chunk in enumerate(plan.chunks) if chunk.supposed]
        if step is not None and drafted:
            step.move_on([len(accepted[index][0]) if index in accepted else 0 for index in drafted])
""",
        "",
    ),
    (_MICRO_BATCH, "        verified = self._settle(plan, accepted)\n", ""),
    (
        _MICRO_BATCH,
        """            one = verified.get(index)
            if one is not None and one.drafter == PREDICTION:
                event.predicted = Predicted(min(one.right, kept), one.rows - one.right)
""",
        "",
    ),
    (_MICRO_BATCH, "        return tuple(verified.values())\n", "        return ()\n"),
    (_SCHEDULER, "        guessed = sum(len(sequence.draft) for sequence in mine)\n", ""),
    (
        _SCHEDULER,
        """            if kind is PROMPT and guessed:
                prompts, guessed = min(prompts, budget - drafts_share(guessed, budget)), 0
""",
        "",
    ),
    (
        _SCHEDULER,
        """        if any(chunk.sequence.draft for chunk in chunks):
            self.blocks.spare(self._running.others(micro_batch), self.prompt_tokens)
            suppose_drafts(chunks, budget, self._limits.longest, self.blocks, self._shares)
""",
        "",
    ),
    (_SCHEDULER, "in_flight = False\n            sequence.draft.clear()\n", "in_flight = False\n"),
    (
        "engine/step/step_input.py",
        """    drafted = tuple(index for index, chunk in enumerate(plan.chunks) if chunk.supposed)
    return HeldStates(drafted) if drafted else None
""",
        "    return None\n",
    ),
    ("engine/verify.py", "    if not any(rows.supposed for rows in asked.values()):\n", "    if True:\n"),
    (
        "engine/attention_node.py",
        """            if done and self._drafting is not None and (ran := mine.ran) is not None:
                pool = ran.rows * self._link.called.take_others(index)
                ran = ran._replace(pool=pool, touched=self._load.touched(index))
                self._drafting.note_step(ran, self._meter.now)
""",
        "",
    ),
)  # fmt: skip
"""A file of the package, what is in it once, and what stands there without drafts."""


def package(folder: Path, *, without: bool) -> None:
    """A copy of the package that runs from `folder`. Raises ValueError where a line that is taken out is not there
    once."""
    shutil.copytree(ROOT / "afserve", folder / "afserve", symlinks=True)
    for room in ("kernels", "comm", "placement", "configs"):
        (folder / room).symlink_to(ROOT / room)
    for name, old, new in TAKEN_OUT if without else ():
        file = folder / "afserve" / name
        text = file.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name}: {text.count(old)} times, and not once, what is taken out:\n{old}")
        file.write_text(text.replace(old, new))


class Engine:
    """One in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "bench.draft_off", "--worker"]
        env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def turn(self, batch: int, steps: int, seed: int) -> tuple[float, list[list[int]]]:
        """Seconds of a step, and the answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([batch, steps, seed]) + "\n")
        self._process.stdin.flush()
        seconds, answers = self._read()
        return seconds, answers

    def _read(self) -> tuple[float, list[list[int]]]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        seconds, answers = json.loads(line)
        return seconds, answers

    def close(self) -> None:
        self._process.communicate(timeout=60)


def work() -> None:
    """Answers lines of batch, steps and seed."""
    import torch

    from afserve.config import EngineConfig, ModelSource
    from afserve.engine.build import colocated
    from afserve.engine.scheduling.request import GenerationRequest, SamplingParams

    torch.set_num_threads(1)
    config = EngineConfig(max_model_len=1024, kv_blocks=4096, max_batch_tokens=1024, draft="off")
    node = colocated(ModelSource(str(ROOT / "configs" / "nano"), "nano"), config)
    print(json.dumps([0.0, []]), flush=True)
    handle = 0
    for line in sys.stdin:
        batch, steps, seed = json.loads(line)
        dice, answers = random.Random(seed), dict[int, list[int]]()
        for _ in range(batch):
            prompt = tuple(dice.randrange(16, 2000) for _ in range(_PROMPT))
            params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
            node.submit(GenerationRequest(handle, prompt, params))
            answers[handle], handle = [], handle + 1
        taken = list[float]()
        with node.stepping():
            while node.busy:
                began = time.perf_counter()
                events = node.step()
                ended = time.perf_counter()
                if len(events) == batch:
                    taken.append(ended - began)
                for event in events:
                    answers[event.handle] += event.token_ids
        print(json.dumps([statistics.median(taken[2:]), list(answers.values())]), flush=True)


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each number of sequences. Raises RuntimeError where answers differ."""
    batches = [int(one) for one in options.batch.split(",")]
    names = (AS_IT_IS, WITHOUT, TWIN)
    found = {(name, batch): list[float]() for name in names for batch in batches}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, str(at)) for at, name in enumerate(names)}
        for name, folder in folders.items():
            folder.mkdir()
            package(folder, without=name == WITHOUT)
        for start in range(options.starts):
            engines = {name: Engine(folders[name]) for name in _turned(names, start)}
            for batch in batches:
                for number in range(options.rounds + 1):  # the first one warms up
                    told = dict[str, tuple[float, list[list[int]]]]()
                    for name in _turned(names, number):
                        steps = max(_LEAST, options.steps // batch)
                        told[name] = engines[name].turn(batch, steps, 1000 * start + number)
                    if any(answers != told[AS_IT_IS][1] for _, answers in told.values()):
                        raise RuntimeError(f"other tokens without the code of drafts, {batch} sequences")
                    if number:
                        for name in names:
                            found[name, batch].append(told[name][0])
            for engine in engines.values():
                engine.close()
    return [_row({name: found[name, batch] for name in names}, batch, options) for batch in batches]


def _turned(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    first = number % len(names)
    return names[first:] + names[:first]


def _row(taken: dict[str, list[float]], batch: int, options: argparse.Namespace) -> dict[str, object]:
    """Ratios of rates, by turn, to the engine without the code of drafts, and of two equal engines."""
    ratios = _ratios(taken[WITHOUT], taken[AS_IT_IS]) + _ratios(taken[WITHOUT], taken[TWIN])
    equal = _ratios(taken[TWIN], taken[AS_IT_IS])
    low, middle, high = statistics.quantiles(ratios)
    equal_low, equal_middle, equal_high = statistics.quantiles(equal)
    return {
        "bench": "draft_off", "batch": batch, "step_us": round(statistics.median(taken[AS_IT_IS]) * 1e6, 1),
        "step_without_us": round(statistics.median(taken[WITHOUT]) * 1e6, 1),
        "ratio": round(middle, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4),
        "equal": round(equal_middle, 4), "equal_low": round(equal_low, 4), "equal_high": round(equal_high, 4),
        "starts": options.starts, "rounds": options.rounds,
    }  # fmt: skip


def _ratios(other: list[float], mine: list[float]) -> list[float]:
    return [one / two for one, two in zip(other, mine, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_off", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,8,32,64", help="sequences at once")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=400, help="of one sequence's turn; fewer of more, 40 at least"
    )
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    for row in measure(options):
        print(
            f"{row['batch']:3}  {row['step_us']} us a step, {row['step_without_us']} without; x {row['ratio']} "
            f"({row['ratio_low']} to {row['ratio_high']}); two equal ones x {row['equal']} "
            f"({row['equal_low']} to {row['equal_high']})",
            flush=True,
        )
        if options.save:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | origin()) + "\n")


if __name__ == "__main__":
    main()
