"""`python -m bench.tenants`: whether the time of a prompt tells one key that another one has asked it.

A server with two keys. Alice asks a prompt; then Bob asks that prompt, one that nobody has asked, and the latter once
more, the first two in an order that is drawn. Times of whole requests are compared by the two-sample test of
Kolmogorov and Smirnov: those of the first two are of one distribution where the cache tells nothing, and the third, of
Bob's own cached prompt, shows what a cache that is found would look like.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from afserve.cli.load.asks import words
from afserve.server.access.key_file import KeyLimits, KeyRole, add_key
from bench.origin import ROOT, origin
from bench.served import served

OUT = ROOT / "bench" / "results" / "tenants.jsonl"
WORDS = 400


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Between the two shares of values up to some value, at the value where it is largest."""
    marked = sorted([(value, 1 / len(one)) for value in one] + [(value, -1 / len(other)) for value in other])
    height, most = 0.0, 0.0
    for place, (value, step) in enumerate(marked):
        height += step
        if place + 1 == len(marked) or marked[place + 1][0] != value:
            most = max(most, abs(height))
    return most


def chance(gap: float, one: int, other: int) -> float:
    """That samples of so many values of one distribution are as far apart, by Stephens (1970)."""
    root = math.sqrt(one * other / (one + other))
    size = (root + 0.12 + 0.11 / root) * gap
    if size < 0.2:
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * k * k * size * size) for k in range(1, 101))
    return float(min(1.0, max(0.0, sum(terms))))


def measure(url: str, alice: str, bob: str, count: int, seed: int) -> dict[str, list[float]]:
    """Seconds of Bob's requests by what they are: `asked` by Alice before, `fresh`, `own` ones again."""
    draw = random.Random(seed)
    found: dict[str, list[float]] = {"asked": [], "fresh": [], "own": []}
    with httpx.Client(base_url=url, timeout=60) as http:

        def seconds(key: str, prompt: str) -> float:
            began = time.perf_counter()
            said = http.post(
                "/v1/completions",
                json={"prompt": prompt, "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
            )
            took = time.perf_counter() - began
            assert said.status_code == 200, said.text
            return took

        for _ in range(count):
            asked, fresh = (words(draw, WORDS) for _ in range(2))
            seconds(alice, asked)
            turns = [("asked", asked), ("fresh", fresh)]
            draw.shuffle(turns)
            for kind, prompt in (*turns, ("own", fresh)):
                found[kind].append(seconds(bob, prompt))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help=f"append the row to {OUT.relative_to(ROOT)}")
    parser.add_argument("flags", nargs="*", help="of afserve up, behind --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        alice, bob = (add_key(file, name, KeyRole.USER, KeyLimits()) for name in ("alice", "bob"))
        with served("--api-keys", str(file), *asked.flags) as server:
            found = measure(server.url, alice, bob, asked.count, asked.seed)
    row: dict[str, object] = {"bench": "tenants", "count": asked.count, "words": WORDS, "flags": asked.flags}
    for kind in ("asked", "own"):
        gap = largest_gap(found[kind], found["fresh"])
        row[kind] = {"gap": round(gap, 4), "chance": round(chance(gap, asked.count, asked.count), 6)}
    row["median_ms"] = {kind: round(sorted(times)[len(times) // 2] * 1e3, 3) for kind, times in found.items()}
    row |= origin()
    print(json.dumps(row))
    if asked.record:
        with OUT.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
