"""What pricing drafts gains over drafts of a fixed length: simulated, with the policy that serves.

    python -m bench.draft_price                  every mix; --save; --rounds N; --routing FILE; --only NAME

Mixes of concurrency 1 to 128 and acceptance 0.2 to 0.9, of drafters that know how sure they are and of others, over two
sets of scripted stages and the recorded routing of OLMoE-1B-7B (`draft_stages.py`). Of each mix: tokens per second with
every fixed length from 0 to 8, with the price, and with a price that is told of its own rows only. Seconds are the
script's, so nothing here depends on the machine that plays it.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afserve.engine.draft.adaptive_price import AdaptivePrice
from afserve.engine.draft.price import Candidate, DraftPrice, FixedPrice
from afserve.placement.rebalance.record import read_counts
from bench.draft_stages import LONGEST, Deployment, Routing, Stages
from bench.origin import ROOT, origin
from bench.placement import DATA

OUT = ROOT / "bench" / "results" / "draft_price.jsonl"
RECORDED = DATA / "olmoe_1b7b_expert_counts.json"
STAGES = (
    Stages("experts' weights are dear", 4e-3, 2e-5, 1e-4, 4e-5, 16),
    Stages("rows are dear", 1e-3, 2e-4, 5e-5, 6e-5, 4),
)
CONCURRENCY = (1, 4, 16, 64, 128)
ACCEPTANCE = (0.2, 0.4, 0.6, 0.8, 0.9)
MIXED = "0.2 and 0.9"
Row = dict[str, object]


class FirstTokens(FixedPrice):
    """So many of each draft."""

    def __init__(self, most: int) -> None:
        self._most = most

    def lengths(self, rows: int, room: int, candidates: Sequence[Candidate]) -> list[int]:
        return [min(self._most, len(candidate.confidence)) for candidate in candidates]


@dataclass(frozen=True, slots=True)
class Mix:
    stages: Stages
    sequences: int
    acceptance: str
    informed: bool

    def deployment(self, routing: Routing) -> Deployment:
        shares = [0.2, 0.9] if self.acceptance == MIXED else [float(self.acceptance)]
        each = [shares[s * len(shares) // self.sequences % len(shares)] for s in range(self.sequences)]
        return Deployment(self.stages, routing, each, self.informed, 1000 + self.sequences)


def mixes(only: str) -> Iterator[Mix]:
    for stages in STAGES:
        for sequences in CONCURRENCY:
            for acceptance in (*map(str, ACCEPTANCE), *([MIXED] if sequences > 1 else [])):
                for informed in (True, False):
                    if only in stages.name:
                        yield Mix(stages, sequences, acceptance, informed)


def play(mix: Mix, routing: Routing, rounds: int) -> Row:
    """Tokens per second by policy."""
    deployment = mix.deployment(routing)

    def rate(prices: Sequence[DraftPrice], tells_pool: bool = True) -> tuple[float, float]:
        played = deployment.play(prices, rounds, tells_pool)
        return played.tokens_s, played.drafted / rounds / mix.sequences

    def priced(tells_pool: bool) -> tuple[float, float]:
        return rate(
            [AdaptivePrice(routing.experts, routing.top_k) for _ in range(deployment.nodes)], tells_pool
        )

    fixed = [rate([FirstTokens(most)] * deployment.nodes)[0] for most in range(LONGEST + 1)]
    (price, mean), (alone, mean_alone) = priced(True), priced(False)
    return {
        "bench": "mix",
        "stages": mix.stages.name,
        "sequences": mix.sequences,
        "nodes": deployment.nodes,
        "acceptance": mix.acceptance,
        "informed": mix.informed,
        "rounds": rounds,
        "tokens_s_fixed": [round(one, 2) for one in fixed],
        "best_length": int(np.argmax(fixed)),
        "tokens_s": round(price, 2),
        "mean_length": round(mean, 2),
        "tokens_s_own_rows": round(alone, 2),
        "mean_length_own_rows": round(mean_alone, 2),
    }


def summary(found: Sequence[Row]) -> Row:
    """Over all mixes; speeds are compared by geometric means, so that no mix counts more than another."""
    fixed = np.array([row["tokens_s_fixed"] for row in found], dtype=np.float64)
    price = np.array([row["tokens_s"] for row in found], dtype=np.float64)
    alone = np.array([row["tokens_s_own_rows"] for row in found], dtype=np.float64)
    several = np.array([row["nodes"] != 1 for row in found])
    mean = np.exp(np.log(fixed).mean(0))
    over = price / fixed.max(1)
    return {
        "bench": "all mixes",
        "mixes": len(found),
        "best_single_length": int(mean.argmax()),
        "over_best_single": round(float(np.exp(np.log(price).mean()) / mean.max()), 3),
        "over_best_of_mix_least": round(float(over.min()), 3),
        "over_best_of_mix_mean": round(float(np.exp(np.log(over).mean())), 3),
        "mixes_below_0.97": int((over < 0.97).sum()),
        "pool_over_own_rows_mean": round(float(np.exp(np.log(price / alone)[several].mean())), 3),
        "pool_over_own_rows_most": round(float((price / alone).max()), 3),
        "pool_over_own_rows_least": round(float((price / alone).min()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Priced drafts beside fixed lengths, simulated.")
    parser.add_argument("--rounds", type=int, default=300, help="Rounds of each play that count.")
    parser.add_argument("--only", default="", help="Stages whose name contains this.")
    parser.add_argument("--routing", type=Path, default=RECORDED, help="Recorded counts of chosen experts.")
    parser.add_argument("--save", action="store_true", help=f"Append rows to {OUT.relative_to(ROOT)}.")
    args = parser.parse_args()
    if not args.routing.exists():
        print(f"{args.routing}: no recorded routing here; nothing is played")
        return
    routing = Routing(np.stack(list(read_counts(args.routing.read_text()).values())), 8)
    found = []
    for mix in mixes(args.only):
        found.append(play(mix, routing, args.rounds))
        print(json.dumps(found[-1]), flush=True)
    found.append(summary(found))
    print(json.dumps(found[-1]))
    if args.save:
        lines = [json.dumps({**row, **origin()}) + "\n" for row in found]
        with OUT.open("a", encoding="utf-8") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
