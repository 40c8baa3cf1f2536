"""`python -m bench.load`: servers under closed load, as their clients see it, ours beside any that are given.

`--truth` checks the client instead: `afserve bench serve` against a scripted server, whose delays are known.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.load_offline import offline
from bench.origin import ROOT, origin
from bench.scripted_server import Script, serving
from bench.served import AFSERVE, served

OUT = ROOT / "bench" / "results" / "serve.jsonl"
TRUTH = ((0.02, 0.005), (0.1, 0.02), (0.5, 0.05))  # seconds: first token, gap
Row = dict[str, Any]


def asked(url: str, streams: int, options: argparse.Namespace) -> Row:
    """One run of the load client in a process of its own."""
    flags = ["--concurrency", str(streams), "--requests", str(options.rounds * streams)]
    flags += [
        "--warm-up",
        str(streams),
        "--input-len",
        str(options.input_len),
        "--output-len",
        str(options.output_len),
    ]
    if options.vocabulary:
        flags += ["--vocabulary", str(options.vocabulary)]
    command = [*AFSERVE, "bench", "serve", "--url", url, "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(done.stdout)
    if row["completed"] != row["sent"]:
        raise RuntimeError(f"{url}: {row['reasons']}")
    return row


def measured(server: str, url: str, options: argparse.Namespace) -> list[Row]:
    """A row per number of streams: the run of the median rate, with the spread of all.

    `listener_us` is the CPU time of the processes that listen there, per token; None where they cannot be seen.
    """
    found, listeners = [], listening_at(url)
    for streams in options.streams:
        before = cpu_of(listeners)
        runs = sorted(
            (asked(url, streams, options) for _ in range(options.repeats)), key=lambda r: r["tokens_per_s"]
        )
        tokens = options.repeats * (options.rounds + 1) * streams * options.output_len  # with the warm-up
        spent = round((cpu_of(listeners) - before) / tokens * 1e6, 1) if listeners else None
        rates = [run["tokens_per_s"] for run in runs]
        row = {
            **runs[len(runs) // 2],
            "server": server,
            "repeats": options.repeats,
            "low": rates[0],
            "high": rates[-1],
            "listener_us": spent,
        }
        found.append({**row, **origin(), "of": Path(options.model).name})
        first, gap = row["ttft_ms"]["p50"], row["itl_ms"]["p50"]
        rate = f"{row['tokens_per_s']:9,.0f} tok/s"
        cpu = "" if spent is None else f"  {spent:6.1f} us of the listeners' CPU a token"
        print(f"{server:16} {streams:4} streams {rate}  TTFT {first:8.1f} ms  ITL {gap:6.2f} ms{cpu}")
    return found


def listening_at(url: str) -> list[psutil.Process]:
    """Processes of this machine that have the socket: of `afserve up` the gateway, and its parent, which is idle."""
    port = urlsplit(url).port
    found = {
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None
    }
    return [psutil.Process(pid) for pid in sorted(found)]


def cpu_of(processes: list[psutil.Process]) -> float:
    """Seconds so far, of all their threads."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def truth(options: argparse.Namespace) -> list[Row]:
    """How far the client's medians are from the script's delays."""
    found = []
    for first, gap in TRUTH:
        for streams in options.streams:
            with serving(Script(first, gap)) as url:
                row = asked(url, streams, options)
            tokens = options.output_len
            errors = {
                "ttft": row["ttft_ms"]["p50"] / (first * 1e3) - 1,
                "tpot": row["tpot_ms"]["p50"] / (gap * 1e3) - 1,
                "e2e": row["e2e_ms"]["p50"] / ((first + gap * (tokens - 1)) * 1e3) - 1,
            }
            exact = row["completion_tokens"] == tokens * row["sent"]
            found.append(
                {**row, "bench": "serve_truth", "first": first, "gap": gap, "errors": errors, "exact": exact}
            )
            said = "  ".join(f"{name} {error:+.1%}" for name, error in errors.items())
            print(
                f"{first:5g} s, {gap:5g} s, {streams:4} streams: {said}  counts {'exact' if exact else 'WRONG'}"
            )
    worst = max(abs(error) for row in found for error in row["errors"].values())
    median = statistics.median(abs(error) for row in found for error in row["errors"].values())
    print(f"median error {median:.1%}, worst {worst:.1%}")
    return [{**row, **origin()} for row in found]


def beside_offline(served_rows: list[Row], options: argparse.Namespace) -> list[Row]:
    """Rows of `LLM` on this machine once no server runs any more, with the share of it that was served."""
    vocabulary = options.vocabulary or 200
    sizes = options.streams, options.rounds, options.repeats, options.input_len, options.output_len
    rows = offline(options.model, *sizes, vocabulary)
    for row in rows:
        first = next(one for one in served_rows if one["concurrency"] == row["concurrency"])
        row["served"], row["served_by"] = (
            round(first["tokens_per_s"] / row["tokens_per_s"], 3),
            first["server"],
        )
        print(
            f"{row['server']:16} {row['concurrency']:4} streams {row['tokens_per_s']:9,.0f} tok/s; "
            f"{row['served_by']} has {row['served']} of it"
        )
    return [{**row, **origin(), "of": Path(options.model).name} for row in rows]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano", help="as for afserve up")
    parser.add_argument(
        "--up", action="append", default=[], help="flags of an `afserve up`, again for one more"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="a server that runs already"
    )
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=0, help="prompts are token ids below it")
    parser.add_argument(
        "--offline", action="store_true", help="also the same load through LLM, beside the first of --up"
    )
    parser.add_argument("--truth", action="store_true", help="check the client against known delays")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    found = truth(options) if options.truth else []
    if not options.truth:
        for flags in options.up or ["--colocated", ""]:
            with served("--model", options.model, *flags.split()) as here:
                found += measured(f"afserve {flags}".strip(), here.url, options)
        for peer in options.peer:
            name, _, url = peer.partition("=")
            found += measured(name, url, options)
    if options.offline and not options.truth:
        found += beside_offline(found, options)
    if options.save:
        with open(options.save, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
