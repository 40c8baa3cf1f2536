"""What --warm-ahead gives a next turn, and what it costs whoever waits: the bundled model on one node of this process.

    python -m bench.warm_ahead [--busy 0.4] [--save]

A conversation's answer has reasoning that the template leaves out of the next prompt: so behind the last prompt nothing
of it is found. With and without the next turn's certain part computed ahead, in turns: seconds from asking to the first
token, and tokens left to compute. Then requests that come at random times, to a node that is else idle and to one that
always has something to compute ahead, in turns: many of them, so that it hardly rests, and so few that it nearly always
has begun with that. Run it on a quiet machine.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import AHEAD_PRIORITY, GenerationRequest, SamplingParams
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "warm_ahead.jsonl"
NANO = ROOT / "configs" / "nano"
HISTORY, ANSWER, RESULT = (
    1_500,
    400,
    60,
)  # tokens: of the last prompt, of its answer without reasoning, of what is said
ARRIVES = 200  # tokens of a prompt that comes at a random time
BUSY = {0.4: 400, 0.05: 150}  # of the time; requests of each turn
_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Asker:
    """One node; requests have the numbers of their turns. Token ids are drawn."""

    def __init__(self, seed: int) -> None:
        config = EngineConfig(
            max_model_len=4096, kv_blocks=2048, block_size=16, max_batch_tokens=512, micro_batches=1
        )
        self.node: AttentionNode[Any] = colocated(ModelSource(str(NANO), "nano"), config)
        self._draw, self._number = random.Random(seed), 0

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(3, 2000) for _ in range(count))

    def submit(self, prompt: Sequence[int], *, ahead: bool = False) -> int:
        self._number += 1
        priority = AHEAD_PRIORITY if ahead else 0
        self.node.submit(GenerationRequest(self._number, tuple(prompt), _ONE, priority=priority))
        return self._number

    def ask(self, prompt: Sequence[int], *, ahead: bool = False) -> tuple[float, int]:
        """Seconds until its token, and the tokens that were not found."""
        began, number = time.perf_counter(), self.submit(prompt, ahead=ahead)
        while True:
            for event in self.node.step():
                if event.handle == number:
                    return time.perf_counter() - began, len(prompt) - event.cached_tokens


def next_turns(rounds: int) -> dict[str, list[tuple[float, int]]]:
    asker, found = Asker(1), dict[str, list[tuple[float, int]]](without=[], ahead=[])
    asker.ask(asker.words(HISTORY))
    for number in range(2 * rounds):
        history = asker.words(HISTORY)
        asker.ask(history)
        certain = history + asker.words(ANSWER)
        if number % 2:
            asker.ask(certain, ahead=True)
        found["ahead" if number % 2 else "without"].append(asker.ask(certain + asker.words(RESULT)))
    return found


def arrivals(busy: float, alone: float, *, ahead: bool, seed: int) -> list[float]:
    """Seconds to first tokens of requests that come at random times, of which one `alone` takes so long."""
    asker, draw = Asker(seed), random.Random(seed)
    for _ in range(20):
        asker.ask(asker.words(ARRIVES))
    due, times, since, now = time.perf_counter(), list[float](), dict[int, float](), 0.0
    while len(times) < BUSY[busy]:
        now = time.perf_counter()
        if now >= due:
            since[asker.submit(asker.words(ARRIVES))] = due
            due += draw.expovariate(busy / alone)
        if ahead and not asker.node.busy:
            asker.submit(asker.words(HISTORY), ahead=True)
        for event in asker.node.step() if asker.node.busy else ():
            if event.handle in since:
                times.append(time.perf_counter() - since.pop(event.handle))
    return times


def late(times: Sequence[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.warm_ahead", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=6, help="of each kind, with the same times of arrival")
    parser.add_argument(
        "--busy",
        type=float,
        nargs="*",
        default=list(BUSY),
        choices=list(BUSY),
        help="shares of the time; else all",
    )
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, turns in next_turns(options.rounds).items():
        seconds, tokens = (
            statistics.median(one for one, _ in turns),
            statistics.median(one for _, one in turns),
        )
        print(f"next turn, {name:8} first token {1e3 * seconds:7.2f} ms, {tokens:5.0f} tokens to compute")
        rows.append({"what": "next turn", "how": name, "p50_ms": round(1e3 * seconds, 3), "tokens": tokens})
    asker = Asker(3)
    alone = statistics.median([asker.ask(asker.words(ARRIVES))[0] for _ in range(60)][20:])
    for share in options.busy:
        waits: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * options.turns):
            ahead, seed = bool(turn % 2), 7 + turn // 2
            waits[ahead] += arrivals(share, alone, ahead=ahead, seed=seed)
        for ahead, times in waits.items():
            name = f"{share:.0%} busy, {'something ahead' if ahead else 'else idle'}"
            p50, p99 = 1e3 * late(times, 0.5), 1e3 * late(times, 0.99)
            print(f"waiting, {name:26} first token p50 {p50:7.2f} ms, p99 {p99:7.2f} ms")
            rows.append({"what": "waiting", "how": name, "p50_ms": round(p50, 3), "p99_ms": round(p99, 3)})
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps({**row, **origin()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
