"""`python -m bench.grammar`: what following a grammar costs decoding, beside the same requests without one.

One colocated node in this process. Every request draws from the whole vocabulary, as a checkpoint of random weights
makes necessary: hardly any draw follows the schema, so almost every token needs a mask. Pairs of runs alternate, and
only the steps between the last first token and the end of the first answer count.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.grammars.grammar import of_schema
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "grammar.jsonl"
# No answer can end before its last token: each item needs one token at least.
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPT = 16


def schema(items: int) -> dict[str, object]:
    return {"type": "array", "items": ITEM, "minItems": items}


class Decoding:
    """One node of a checkpoint; runs one after the other."""

    def __init__(self, folder: str, streams: int, tokens: int, threads: int) -> None:
        self._streams, self._tokens = streams, tokens
        length = PROMPT + tokens
        config = EngineConfig(
            max_model_len=length,
            kv_blocks=streams * (length // 16 + 2),
            max_sequences=streams,
            max_batch_tokens=streams * PROMPT,
            threads=threads,
        )
        self._node = colocated(ModelSource(folder, Path(folder).name), config)
        self._handle = 0

    def rate(self, grammar: str, *, greedy: bool) -> float:
        """Tokens per second of wall time, while all streams decode."""
        left, begun = set(), set()
        for stream in range(self._streams):
            params = SamplingParams(
                max_tokens=self._tokens,
                temperature=0.0 if greedy else 1.0,
                seed=None if greedy else stream,
                grammar=grammar,
                ignore_eos=not grammar,
            )
            prompt = tuple(10 + (stream * 7 + at) % 200 for at in range(PROMPT))
            self._node.submit(GenerationRequest(self._handle, prompt, params))
            left.add(self._handle)
            self._handle += 1
        since, tokens, rate = 0.0, 0, 0.0
        while left:
            for event in self._node.step():
                begun.add(event.handle)
                tokens += len(event.token_ids)
                if event.error:
                    raise RuntimeError(event.error)
                if event.finish_reason is not None:
                    left.discard(event.handle)
                    rate = rate or tokens / (time.perf_counter() - since)
            if len(begun) == self._streams and not since:
                since, tokens = time.perf_counter(), 0
        return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "configs" / "nano"), help="a checkpoint folder")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    decoding = Decoding(options.model, options.streams, options.tokens, options.threads)
    grammar = of_schema(schema(options.tokens))
    for greedy in (False, True):
        pairs = []
        for turn in range(options.pairs + 1):
            pair = decoding.rate("", greedy=greedy), decoding.rate(grammar, greedy=greedy)
            if turn:  # the first pair has compiled the grammar, and everything has run once
                pairs.append(pair)
        ratios = sorted(guided / free for free, guided in pairs)
        row = {
            "bench": "grammar",
            "of": Path(options.model).name,
            "drawn": "greedy" if greedy else "sampled",
            "streams": options.streams,
            "tokens": options.tokens,
            "threads": options.threads,
            "free": round(statistics.median(free for free, _ in pairs)),
            "guided": round(statistics.median(guided for _, guided in pairs)),
            "ratio": round(statistics.median(ratios), 3),
            "low": round(ratios[0], 3),
            "high": round(ratios[-1], 3),
        }
        print(
            f"{row['drawn']:>8} {options.streams:>4} streams: {row['free']:,} tok/s without, {row['guided']:,} with: "
            f"{row['ratio']} ({row['low']} to {row['high']})"
        )
        if options.save:
            with Path(options.save).open("a") as file:
                file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
