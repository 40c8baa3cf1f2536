"""A healthy deployment beside busy loops that leave it a fraction of the processors: nobody who lives may be lost.

    python -m bench.overloaded_host [--seconds 300] [--loops 8] [--flags "--gateways 2"] [--json] [--save]

nano on 2 attention and 2 expert nodes; `--loops` endless loops for each core run beside it at the same priority.
Greedy streams begin one after another in a few lanes. Requests are slow, complete, and as they are on a quiet host.
"""

import argparse
import asyncio
import itertools
import json
import os
import shlex
import time

from bench.busy import busy_loops
from bench.faults_deployment import Deployment
from bench.faults_load import PROMPTS, Answer, Load, altered, failed
from bench.origin import ROOT, origin
from bench.served import Served, served

RESULTS = ROOT / "bench" / "results" / "overloaded_host.jsonl"
NODES = ("--attention", "2", "--experts", "2")
LANES = 4
Row = dict[str, object]


async def lanes(load: Load, seconds: float) -> list[Answer]:
    """Requests one after another in each lane, until the time is over and the last ones have ended."""
    until, answers = time.monotonic() + seconds, list[Answer]()

    async def lane(first: int) -> None:
        number = first
        while time.monotonic() < until:
            answer = Answer(PROMPTS[number % len(PROMPTS)], time.monotonic())
            answers.append(answer)
            await load.read(answer)
            number += LANES

    await asyncio.gather(*(lane(first) for first in range(LANES)))
    return answers


async def play(here: Deployment, seconds: float, loops: int, tokens: int) -> Row:
    load = Load(here.url, 1.0, tokens)
    expected, before = await load.reference(), here.serving()
    with busy_loops(loops):
        answers = await lanes(load, seconds)
    await load.close()
    status, after = here.status(), here.serving()
    waits = [[b - a for a, b in itertools.pairwise([x.began, *x.times])] for x in answers]
    longest = sorted(max(each, default=0.0) for each in waits)
    return {
        "bench": "overloaded_host",
        "seconds": seconds,
        "loops": loops,
        "cores": len(os.sched_getaffinity(0)),
        "requests": len(answers),
        "failed": failed(answers),
        "altered": altered(answers, expected),
        "lost": status["lost"],
        "other_processes": sorted(name for name, pid in before.items() if after.get(name) != pid),
        "median_longest_wait_s": round(longest[len(longest) // 2], 2),
        "longest_wait_s": round(longest[-1], 2),
        "incidents": [incident["text"] for incident in status["incidents"]],
    }


def measure(up: Served, options: argparse.Namespace) -> Row:
    cores = len(os.sched_getaffinity(0))
    with Deployment(up) as here:
        return asyncio.run(play(here, options.seconds, options.loops * cores, options.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overloaded_host", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--loops", type=int, default=8, help="busy loops for each core")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--flags", default="", help="more flags of `afserve up`, in one string")
    parser.add_argument("--json", action="store_true", help="the row alone")
    parser.add_argument("--save", action="store_true", help=f"append it to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    with served(*NODES, *shlex.split(options.flags)) as up:
        row = measure(up, options)
        if not options.json:
            print(up.printed())
    print(json.dumps(row, indent=None if options.json else 1), flush=True)
    if options.save:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **origin()}) + "\n")
    if row["failed"] or row["altered"] or row["other_processes"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
