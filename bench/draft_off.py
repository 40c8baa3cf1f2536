"""`python -m bench.draft_off [--save]`: what the code of drafts costs a run that drafts nothing.

The engine as it is beside the engine without what its steps do for drafts alone: a copy of the package from which these
lines are taken out (`TAKEN_OUT`; a line that is not there once ends the run). A third one is as it is, too, and says
how far two equal ones are apart. Each is a colocated node of the bundled model with one thread, all in one process;
they decode the same prompts, a token a step, and take turns step by step, so that what else the machine does meets all
of them. Of a round the median of the steps' ratios counts, `--rounds` times in each of `--starts` processes, which
differ by where memory lies. Answers have to be the same tokens.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results" / "draft_off.jsonl"
AS_IT_IS, TWIN, WITHOUT = "as it is", "as it is, again", "without"
NAMES = (AS_IT_IS, WITHOUT, TWIN)
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
            follower = following(self._follower)
            self.plan = self._scheduler.plan(self.index, since, self._most_passes(follower, asked=asked))
""",
        "            self.plan = self._scheduler.plan(self.index, since, self._most_passes(None, asked=False))\n",
    ),
    (
        _MICRO_BATCH,
        """            awake = follower is not None and follower.drafter.awake
            every_row = follower is not None and follower.reads_rows
            step = build_step(self.plan, pool.block_size, self._buffers, pool.further, every_row=every_row)
""",
        "            step = build_step(self.plan, pool.block_size, self._buffers, pool.further)\n",
    ),
    (
        _MICRO_BATCH,
        """            outcome, x_RH = computed
            drafted = self.plan.supposed if self.plan.drafted else 0
            passes = 0.0
            if follower is not None:
                since = self._meter.now()
                yield from follower.follow(self.plan, step, x_RH, _drawn(self.plan, outcome.accepted))
                passes = (self._meter.now() - since) / follower.passes if awake else 0.0
            verified = self._book(self.plan, outcome)
            self.decode_only, self.ran = step.decodes == step.tokens, None
            if self._drafting is not None and not step.ahead:
                seconds = self._meter.now() - began - passes
                if asked or passes:
                    ran = RanStep(step.tokens, drafted, seconds, mixed=not self.decode_only)
                    self.ran = ran._replace(passes=passes, verified=verified)
                else:
                    self._drafting.rest_steps(seconds, outcome.passes)
""",
        """            outcome, _ = computed
            self._book(self.plan, outcome)
            self.decode_only = step.decodes == step.tokens
""",
    ),
    (
        _MICRO_BATCH,
        """        told = {"drafted": plan.supposed, "accepted": outcome.accepted_drafts} if plan.drafted else NO_ARGS
        self._meter.did(self.index, "sample", since, told)
""",
        '        self._meter.did(self.index, "sample", since)\n',
    ),
    (_MICRO_BATCH, " - 1 - plan.chunks[index].supposed for", " - 1 for"),
    (_MICRO_BATCH, "bool(plan.drafted) or any(", "any("),
    (_MICRO_BATCH, "draw = draw_runs if plan.drafted else draw_tokens", "draw = draw_tokens"),
    (_MICRO_BATCH, "sequence, row, plan.chunks[index].supposed)", "sequence, row)"),
    (
        _MICRO_BATCH,
        """        if step is not None and plan.drafted:
            step.move_on([len(accepted[index][0]) if index in accepted else 0 for index in plan.drafted])
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
    (_SCHEDULER, "        guessed, drafted = 0, NOBODY\n", ""),
    (
        _SCHEDULER,
        """            if kind is not PROMPT:
                guessed += len(sequence.draft)
            elif guessed:
                prompts = min(prompts, budget - drafts_share(guessed, budget))
""",
        "",
    ),
    (
        _SCHEDULER,
        """        if guessed:
            self.blocks.spare(self._running.others(micro_batch), self.prompt_tokens)
            drafted = suppose_drafts(chunks, budget, self._limits.longest, self.blocks, self._shares)
""",
        "",
    ),
    (_SCHEDULER, "if most_passes and chunks and not drafted:", "if most_passes and chunks:"),
    (_SCHEDULER, "tuple(chunks), drafted, alone", "tuple(chunks), alone"),
    (_SCHEDULER, "in_flight = False\n            sequence.draft.clear()\n", "in_flight = False\n"),
    (
        "engine/step/step_input.py",
        "    return HeldStates(plan.drafted) if plan.drafted else None\n",
        "    return None\n",
    ),
    (
        "engine/ping_pong.py",
        """        if self._drafting is not None and (ran := mine.ran) is not None:
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


def node_of(folder: Path) -> tuple[Any, Any]:
    """A colocated node of the package in `folder`, and its module of requests. The package is imported anew; kernels
    are those that are there."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "afserve"]:
        if not name.startswith("afserve.kernels"):
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    config = import_module("afserve.config")
    build = import_module("afserve.engine.build")
    if not str(build.__file__).startswith(str(folder)):
        raise RuntimeError(f"{build.__file__} was imported, and not what is in {folder}")
    wanted = config.EngineConfig(max_model_len=1024, kv_blocks=4096, max_batch_tokens=1024, draft="off")
    made = build.colocated(config.ModelSource(str(ROOT / "configs" / "nano"), "nano"), wanted)
    made.note_line(0, moving=True)  # a token a step
    sys.path.remove(str(folder))
    return made, import_module("afserve.engine.scheduling.request")


def work(scratch: Path, batches: list[int], rounds: int, steps: int, seed: int) -> None:
    """Prints a line for each number of sequences: by name, the medians of its rounds in seconds a step; and by round
    the medians of what `WITHOUT` and `TWIN` took of `AS_IT_IS`. Raises RuntimeError where answers differ."""
    import torch

    torch.set_num_threads(1)
    made = {name: node_of(scratch / str(at)) for at, name in enumerate(NAMES)}
    for batch in batches:
        of = {WITHOUT: list[float](), TWIN: list[float]()}
        seconds = {name: list[float]() for name in NAMES}
        for number in range(rounds + 1):  # the first one warms up
            taken, answers = turn(made, batch, max(_LEAST, steps // batch), seed + number)
            if any(answers[name] != answers[AS_IT_IS] for name in NAMES):
                raise RuntimeError(f"other tokens without the code of drafts, {batch} sequences")
            if number:
                for name, own in of.items():
                    pairs = zip(taken[name], taken[AS_IT_IS], strict=True)
                    own.append(statistics.median(one / other for one, other in pairs))
                for name in NAMES:
                    seconds[name].append(statistics.median(taken[name]))
        medians = {name: statistics.median(own) for name, own in seconds.items()}
        print(json.dumps([batch, medians, of]), flush=True)


def turn(
    made: dict[str, Any], batch: int, steps: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Seconds of the steps of each, taken one after the other; and the answers."""
    dice = random.Random(seed)
    prompts = [tuple(dice.randrange(16, 2000) for _ in range(_PROMPT)) for _ in range(batch)]
    answers: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in made}
    taken = {name: list[float]() for name in made}
    for node, request in made.values():
        params = request.SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
        for handle, prompt in enumerate(prompts):
            node.submit(request.GenerationRequest(handle, prompt, params))
    with made[AS_IT_IS][0].stepping():
        for number in range(4 * steps):
            for name in _turned(NAMES, number):
                began = time.perf_counter()
                events = made[name][0].step()
                ended = time.perf_counter()
                if len(events) == batch:
                    taken[name].append(ended - began)
                for event in events:
                    answers[name][event.handle] += event.token_ids
            if not any(node.busy for node, _ in made.values()):
                return taken, answers
    raise RuntimeError(f"{batch} sequences of {steps} tokens were not done in {4 * steps} steps")


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each number of sequences."""
    found = dict[int, list[tuple[dict[str, float], dict[str, list[float]]]]]()
    with tempfile.TemporaryDirectory() as scratch:
        for at, name in enumerate(NAMES):
            folder = Path(scratch, str(at))
            folder.mkdir()
            package(folder, without=name == WITHOUT)
        asked = ["--batch", options.batch, "--rounds", str(options.rounds), "--steps", str(options.steps)]
        for start in range(options.starts):
            command = [sys.executable, "-m", "bench.draft_off", "--worker", scratch, *asked]
            command += ["--seed", str(1000 * start)]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            for line in done.stdout.splitlines():
                batch, medians, of = json.loads(line)
                found.setdefault(batch, []).append((medians, of))
    return [_row(batch, told, options) for batch, told in found.items()]


def _turned(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    first = number % len(names)
    return names[first:] + names[:first]


def _row(
    batch: int, told: list[tuple[dict[str, float], dict[str, list[float]]]], options: argparse.Namespace
) -> dict[str, object]:
    """Ratios of rates to the engine without the code of drafts, and of two equal engines."""

    def micros(name: str) -> float:
        return round(statistics.median(medians[name] for medians, _ in told) * 1e6, 1)

    row: dict[str, object] = {"bench": "draft_off", "batch": batch, "step_us": micros(AS_IT_IS)}
    row["step_without_us"] = micros(WITHOUT)
    for kind, name in (("ratio", WITHOUT), ("equal", TWIN)):
        quarters = statistics.quantiles([one for _, of in told for one in of[name]])
        for end, value in zip(("_low", "", "_high"), quarters, strict=True):
            row[f"{kind}{end}"] = round(value, 4)
    return row | {"starts": options.starts, "rounds": options.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_off", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,8,32,64", help="sequences at once")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=400, help="of one sequence's turn; fewer of more, 40 at least"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        batches = [int(one) for one in options.batch.split(",")]
        work(options.worker, batches, options.rounds, options.steps, options.seed)
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
