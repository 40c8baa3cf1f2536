"""`python -m bench.drafts [--save]`: generated tokens per second of the bundled model with drafts and without.

Three kinds of text, new in every turn and the same for all engines in one: `code`, the beginnings of files that the
model was not trained on; `copy`, such a file's beginning and the first third of it again, which the answer goes on to
repeat; `new`, drawn at temperature 1 behind random tokens, where nothing repeats. Every engine is a deployment that
stays; at each size they take turns, `--rounds` times. Ratios are by round, to the engine without drafts; the answers of
a turn have to be the same tokens.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenizers import Tokenizer

from afserve import LLM, SamplingParams
from bench.nano.corpus import documents
from bench.origin import origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "drafts.jsonl"
NANO = ROOT / "configs" / "nano"
TEXTS = ("code", "copy", "new")
PLAIN = "off"
_PROMPT, _COPIED = 160, 480  # tokens
_SETTLE = 0.3  # seconds before a turn
Prompts = list[list[int]]


class Texts:
    """Prompts that no turn has had before."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
        held_out = [doc.text for doc in documents() if doc.held_out and len(doc.text) > 4000]
        self._files = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in held_out]

    def prompts(self, kind: str, count: int) -> Prompts:
        return [self._one(kind) for _ in range(count)]

    def _one(self, kind: str) -> list[int]:
        if kind == "new":
            return [self._dice.randrange(10, 2048) for _ in range(_PROMPT)]
        length = _COPIED if kind == "copy" else _PROMPT
        file = self._dice.choice([ids for ids in self._files if len(ids) > length])
        start = self._dice.randrange(len(file) - length)
        piece = file[start : start + length]
        return piece + piece[: length // 3] if kind == "copy" else piece


def rate(llm: LLM, prompts: Prompts, params: SamplingParams) -> tuple[float, list[tuple[int, ...]]]:
    """Generated tokens per second of wall time, prompts included; and the answers."""
    time.sleep(_SETTLE)
    began = time.perf_counter()
    done = llm.generate(prompts, params)
    elapsed = time.perf_counter() - began
    answers = [tuple(one.token_ids) for one in done]
    return sum(map(len, answers)) / elapsed, answers


def measure(
    engines: dict[str, LLM], kind: str, batch: int, rounds: int, tokens: int, texts: Texts
) -> list[dict[str, object]]:
    """A row an engine. Raises RuntimeError where answers differ."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    params = SamplingParams(max_tokens=tokens, temperature=float(kind == "new"), seed=7, ignore_eos=True)
    for turn in range(rounds + 1):  # the first one warms up
        prompts, wanted = texts.prompts(kind, batch), None
        for name, llm in _order(engines, turn):
            found, answers = rate(llm, prompts, params)
            wanted = wanted or answers
            if answers != wanted:
                raise RuntimeError(f"{name}: other tokens than without drafts, {kind} at {batch}")
            if turn:
                rates[name].append(found)
    plain = rates[PLAIN]
    rows = []
    for name, mine in rates.items():
        ratios = sorted(one / other for one, other in zip(mine, plain, strict=True))
        rows.append(
            {
                "bench": "drafts",
                "draft": name,
                "text": kind,
                "batch": batch,
                "tokens_per_s": round(statistics.median(mine), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_low": round(ratios[0], 3),
                "ratio_high": round(ratios[-1], 3),
                "ratio_quarters": [round(one, 3) for one in statistics.quantiles(ratios)]
                if rounds > 1
                else [],
                "rounds": rounds,
                "tokens": tokens,
            }
        )
    return rows


def _order(engines: dict[str, LLM], turn: int) -> Sequence[tuple[str, LLM]]:
    names = list(engines)
    first = turn % len(names)
    return [(name, engines[name]) for name in names[first:] + names[:first]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", default="off,ngram,suffix,mtp,auto", help="engines; off is always one")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--batch", default="1,8,32", help="sequences at once")
    parser.add_argument("--topology", default="colocated", help="colocated, or AxF such as 2x2")
    parser.add_argument("--threads", type=int, default=2, help="of the whole deployment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="append the rows to bench/results/drafts.jsonl")
    options = parser.parse_args()
    names = list(dict.fromkeys([PLAIN, *options.drafts.split(",")]))
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(name, options)) for name in names}
        texts = Texts(options.seed)
        for kind in options.texts.split(","):
            for batch in map(int, options.batch.split(",")):
                for row in measure(engines, kind, batch, options.rounds, options.tokens, texts):
                    whole = row | {"topology": options.topology, "threads": options.threads} | origin()
                    print(
                        f"{kind:5} {batch:3}  {row['draft']:8} {row['tokens_per_s']:9} tok/s  x {row['ratio']:<6}"
                        f" ({row['ratio_low']} to {row['ratio_high']}; quarters {row['ratio_quarters']})",
                        flush=True,
                    )
                    if options.save:
                        with RESULTS.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(whole) + "\n")


def _engine(name: str, options: argparse.Namespace) -> LLM:
    if options.topology == "colocated":
        return LLM("nano", colocated=True, threads=options.threads, draft=name)
    attention, experts = map(int, options.topology.split("x"))
    each = max(1, options.threads // (attention + experts))
    return LLM("nano", attention=attention, experts=experts, threads=each, draft=name)


if __name__ == "__main__":
    main()
