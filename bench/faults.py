"""What clients notice when nodes are killed and stopped and networks are cut, in real deployments under load.

    python -m bench.faults [--quick] [--only WORDS] [--json] [--save]
    python -m bench.faults --changes                   nodes added, removed and restarted instead
    python -m bench.faults --cost                      what it costs while nothing is lost
    python -m bench.faults --soak 30 --arrivals FILE   so many minutes of seeded faults
    python -m bench.faults --survival --busy 40        everything that may be lost, on every transport

nano on 2 attention and 3 expert nodes as real processes; greedy streams begin at a fixed rate. A stall is the longest
wait for a token of a stream that was open at the moment. Every stream is compared with an undisturbed one.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from afserve.drafts import DEFAULT_DRAFT
from bench import faults_changes, faults_cost, faults_networks, faults_nodes, faults_soak, faults_survival
from bench.cable import possible
from bench.faults_cost import CostCase
from bench.faults_deployment import Deployment
from bench.faults_nodes import NODES, Row
from bench.faults_soak import Soak
from bench.origin import ROOT, origin
from bench.served import served

RESULTS = ROOT / "bench" / "results"
QUICK_FAULTS, QUICK_PAIRS = 3, 3


def cases(options: argparse.Namespace) -> Iterator[Row]:
    """Nodes first, then networks where this machine lets us have hosts."""
    wanted = options.only or ""
    for case in faults_nodes.CASES:
        if wanted in case.name and not options.networks:
            faults = max(1, options.faults // 4) if case.rare else options.faults
            with served(*NODES, *case.flags) as up, Deployment(up) as here:
                yield asyncio.run(faults_nodes.play(case, here, faults, options.rate, options.tokens))
    for network in faults_networks.CASES:
        if wanted in network.name and possible():
            with faults_networks.two_hosts() as (here, cable):
                yield asyncio.run(faults_networks.play(network, here, cable))
    if not possible():
        print("networks: not measured; they need Linux, root, ip(8) and /dev/net/tun")


def changes(options: argparse.Namespace) -> Iterator[Row]:
    turns = 1 if options.quick else max(1, options.faults // 4)
    with served(*NODES, *faults_changes.FLAGS) as up, Deployment(up) as here:
        yield from asyncio.run(faults_changes.play(here, turns, options.rate, options.tokens))


def cost(options: argparse.Namespace) -> Iterator[Row]:
    yield faults_cost.measure(
        CostCase(starts=1, pairs=QUICK_PAIRS, seconds=2.0) if options.quick else CostCase()
    )


def soak(options: argparse.Namespace) -> Iterator[Row]:
    path = options.arrivals
    if path is not None and not path.exists():
        print(f"--arrivals {path}: there is no such file; arrivals are drawn instead")
        path = None
    asked = Soak(
        60 * options.soak,
        path,
        options.rate,
        options.seed,
        mixed=options.mixed,
        busy=options.busy,
        draft=options.draft,
    )
    yield faults_soak.measure(asked)


def survival(options: argparse.Namespace) -> Iterator[Row]:
    yield from faults_survival.table(options.transports.split(","), options.busy, options.only or "")


LINES: dict[object, Callable[[Row], str]] = {
    "faults": faults_nodes.line_of,
    "faults_networks": faults_networks.line_of,
    "faults_changes": faults_changes.line_of,
    "faults_cost": faults_cost.line_of,
    "faults_soak": faults_soak.line_of,
    "faults_survival": faults_survival.line_of,
}


def _asked(options: argparse.Namespace) -> Callable[[argparse.Namespace], Iterator[Row]]:
    chosen = (
        (options.soak, soak),
        (options.cost, cost),
        (options.changes, changes),
        (options.survival, survival),
    )
    return next((measured for wanted, measured in chosen if wanted), cases)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--faults", type=int, default=20, help="of each case; a quarter where a node is stopped"
    )
    parser.add_argument("--quick", action="store_true", help="few faults or pairs: works, proves little")
    parser.add_argument("--rate", type=float, default=4.0, help="requests that begin per second")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--networks", action="store_true", help="only the cases of networks")
    parser.add_argument(
        "--changes", action="store_true", help="instead: changes while serving, --faults / 4 of each"
    )
    parser.add_argument("--cost", action="store_true", help="instead: pairs with --on-loss end")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="instead: seeded faults for so long")
    parser.add_argument("--survival", action="store_true", help="instead: what is lost alone and with others")
    parser.add_argument("--transports", default=",".join(faults_survival.TRANSPORTS), help="for --survival")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="for --survival and --soak: busy loops beside it"
    )
    parser.add_argument("--mixed", action="store_true", help="for --soak: requests of every kind beside it")
    parser.add_argument(
        "--draft", default=DEFAULT_DRAFT, metavar="METHOD[:N]", help="for --soak: as of afserve up"
    )
    parser.add_argument("--arrivals", type=Path, help="for --soak: a trace, .csv or .jsonl, scaled to --rate")
    parser.add_argument("--seed", type=int, default=1, help="for --soak: of faults, lengths and cancels")
    parser.add_argument("--json", action="store_true", help="rows instead of a table")
    parser.add_argument("--save", action="store_true", help=f"append rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.quick:
        options.faults = QUICK_FAULTS
    for row in _asked(options)(options):
        print(json.dumps(row) if options.json else LINES[row["bench"]](row), flush=True)
        if options.save:
            with (RESULTS / f"{row['bench']}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
