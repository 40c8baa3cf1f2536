"""`python -m bench.load_clients`: what outside load clients say of one server, beside `afserve bench serve`.

By default the server is scripted and its delays are known: what guidellm, aiperf and locust say of the first token, the
gap between tokens and the whole request is put beside the script. With `--served` the server is `afserve up` at a share
of its capacity: clients take turns, and their medians are put beside one another. A client that lies in another
environment is given as `--client NAME=COMMAND`; one that is found nowhere is said and left out.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from afserve.launch.plan.models import CONFIGS
from afserve.tokens.tokenizer import Tokenizer
from bench.load_reports import CLIENTS, Load, Report, command_of
from bench.origin import ROOT, origin
from bench.scripted_server import Script, serving
from bench.served import AFSERVE, Served, served

OUT = ROOT / "bench" / "results" / "load_clients.jsonl"
TIMES = ("ttft", "gap", "e2e")
WANTED = 0.05  # of the truth, where it is known
CLOCK_MS = 0.01  # what rows keep of a time
ALIKE = 0.10  # from the lowest to the highest median of all clients
BUSY = 48  # streams that show what a server can do
Row = dict[str, Any]


def scripted(options: argparse.Namespace, commands: dict[str, list[str]]) -> list[Row]:
    """Each client's medians in milliseconds, and how far each is from the script."""
    first, gap = options.first * 1e3, options.gap * 1e3
    truth = {"ttft": first, "gap": gap, "e2e": first + gap * (options.tokens - 1)}
    rows = []
    for name, command in commands.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Script(options.first, options.gap)) as url,
        ):
            prompts = prompts_for(CONFIGS / "nano", options.prompt, options.requests, Path(folder, "prompts"))
            load = Load(
                url,
                "scripted",
                CONFIGS / "nano",
                prompts,
                options.prompt,
                options.tokens,
                options.requests,
                options.streams,
            )
            found = CLIENTS[name](command, load, Path(folder))
        row = {
            "bench": "load_clients",
            "client": name,
            **{key: getattr(options, key) for key in ("streams", "requests", "tokens", "first", "gap")},
            "told": _rounded(found),
            "errors": {key: round(found[key] / truth[key] - 1, 4) for key in TIMES},
            "exact": counts(found) == (options.requests, 0, options.requests * options.tokens),
        }
        rows.append(row)
        said = "  ".join(f"{key} {error:+.1%}" for key, error in row["errors"].items())
        within = max(abs(error) for error in row["errors"].values()) <= WANTED
        print(
            f"{name:20} {said}  {_in_words(row['exact'])}  {'within' if within else 'NOT within'} {WANTED:.0%}"
        )
    return rows


def beside_one_another(options: argparse.Namespace, commands: dict[str, list[str]]) -> list[Row]:
    """A row per client: the medians of its turns, and how far each is from the middle of all clients."""
    turns: dict[str, list[Report]] = {name: [] for name in commands}
    ours: dict[str, list[bool]] = {name: [] for name in commands}
    with (
        tempfile.TemporaryDirectory() as scratch,
        served("--model", options.model, *options.up.split()) as server,
    ):
        (model, folder) = _model_of(server, options.model)
        rate, capacity = _rate(server, model, folder, options, Path(scratch))
        print(f"{capacity:.1f} requests/s at {BUSY} streams; {rate:.2f} are sent", flush=True)
        for turn in range(options.turns):
            for number, (name, command) in enumerate(commands.items()):
                with tempfile.TemporaryDirectory() as place:
                    seed = 100 * (turn + 1) + number  # no prompt of another turn is in a prefix cache
                    prompts = prompts_for(
                        folder, options.prompt, options.requests, Path(place, "prompts"), seed
                    )
                    load = Load(
                        server.url,
                        model,
                        folder,
                        prompts,
                        options.prompt,
                        options.tokens,
                        options.requests,
                        options.streams,
                        rate,
                        seed,
                    )
                    before = counted(server)
                    found = CLIENTS[name](command, load, Path(place))
                    after = counted(server)
                turns[name].append(found)
                whole = (options.requests, 0, options.requests * options.tokens)
                same = (after[0] - before[0], 0, after[1] - before[1]) == whole
                ours[name].append(counts(found) == whole and same)
                said = "  ".join(f"{key} {found[key]:.2f} ms" for key in TIMES)
                print(f"{name:20} {said}  {_in_words(ours[name][-1])}", flush=True)
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for name, found in turns.items()
    }
    middle = {key: statistics.median(found[key] for found in medians.values()) for key in TIMES}
    spread = {key: _apart([found[key] for found in medians.values()]) for key in TIMES}
    said = "  ".join(f"{key} {value:.1%}" for key, value in spread.items())
    print(
        f"from the lowest to the highest: {said}  ({'' if max(spread.values()) <= ALIKE else 'NOT '}within {ALIKE:.0%})"
    )
    return [
        {
            "bench": "load_clients_served",
            "client": name,
            "of": Path(options.model).name,
            "up": options.up,
            **{
                key: getattr(options, key)
                for key in ("streams", "requests", "tokens", "prompt", "turns", "share")
            },
            "rate": round(rate, 3),
            "capacity": round(capacity, 3),
            "told": _rounded(found),
            "beside": {key: round(_beside(found[key], middle[key]), 4) for key in TIMES},
            "spread": {key: round(value, 4) for key, value in spread.items()},
            "exact": all(ours[name]),
        }
        for name, found in medians.items()
    ]


def counts(found: Report) -> tuple[float, float, float]:
    """(answers, failures, tokens of all answers)"""
    return found["requests"], found["errors"], found["tokens"]


def counted(server: Served) -> tuple[int, int]:
    """(requests that ended, tokens that were generated) since the server began, as its own metrics say."""
    lines = httpx.get(f"{server.url}/metrics", headers=server.admin, timeout=60).text.splitlines()

    def total(name: str) -> int:
        return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")))

    return total("vllm:request_success_total"), total("vllm:generation_tokens_total")


def prompts_for(tokenizer: Path, tokens: int, count: int, out: Path, seed: int = 0) -> Path:
    """A file of so many chats, each of about so many tokens of text that no other one has."""
    dice, words = random.Random(seed), Tokenizer.from_folder(str(tokenizer))
    with out.open("w") as file:
        for _ in range(count):
            text = " ".join(f"{dice.randrange(1 << 30):x}" for _ in range(tokens))
            content = words.decode(words.encode(text)[:tokens])
            file.write(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    return out


def _rate(
    server: Served, model: str, folder: Path, options: argparse.Namespace, scratch: Path
) -> tuple[float, float]:
    """(requests per second to send, requests per second when many streams are open)"""
    prompts = prompts_for(folder, options.prompt, 4 * BUSY, scratch / "prompts", seed=1)
    command = [
        *AFSERVE, "bench", "serve", "--url", server.url, "--model", model, "--json", "--endpoint", "chat",
        "--concurrency", str(BUSY), "--requests", str(3 * BUSY), "--warm-up", str(BUSY),
        "--prompts", str(prompts), "--output-len", str(options.tokens),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    capacity = float(json.loads(done.stdout)["requests_per_s"])
    return options.share * capacity, capacity


def _model_of(server: Served, asked: str) -> tuple[str, Path]:
    """What it is called, and the folder that has its tokenizer."""
    listed = httpx.get(f"{server.url}/v1/models", headers=server.admin, timeout=60).json()
    folder = Path(asked) if Path(asked).is_dir() else CONFIGS / asked
    return listed["data"][0]["id"], folder.resolve()


def _rounded(found: Report) -> Report:
    return {key: round(value, 3) for key, value in found.items()}


def _apart(times: Sequence[float]) -> float:
    """The highest beside the lowest."""
    return _beside(max(times), min(times))


def _beside(one: float, other: float) -> float:
    """Their ratio, less 1; a time too short for the clock is 0, and as long as itself."""
    return 0.0 if one == other else one / max(other, CLOCK_MS) - 1


def _in_words(exact: bool) -> str:
    return f"counts {'exact' if exact else 'WRONG'}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    given = dict(pair.partition("=")[::2] for pair in options.client)
    if unknown := set(given) - set(CLIENTS):
        print(f"--client: {', '.join(unknown)}: none of {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    commands = {}
    for name in options.only or CLIENTS:
        command = command_of(name, given)
        if command is None:
            print(f"{name:20} not installed; give it as --client '{name}=COMMAND'")
        else:
            commands[name] = command
    rows = beside_one_another(options, commands) if options.served else scripted(options, commands)
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps({**row, **origin()}) + "\n" for row in rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load_clients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--client", action="append", default=[], metavar="NAME=COMMAND", help="how a client is started"
    )
    parser.add_argument("--only", action="append", default=[], choices=sorted(CLIENTS), metavar="NAME")
    parser.add_argument("--streams", type=int, default=4, help="open at once; with --served at most")
    parser.add_argument("--requests", type=int, default=40, help="of each client and turn")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt, about")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--first", type=float, default=0.2, help="scripted: seconds before the first token")
    parser.add_argument("--gap", type=float, default=0.02, help="scripted: seconds between tokens")
    parser.add_argument("--served", action="store_true", help="against `afserve up` instead of a script")
    parser.add_argument("--model", default="nano", help="with --served: as for afserve up")
    parser.add_argument("--up", default="--colocated", metavar="FLAGS", help="with --served: of afserve up")
    parser.add_argument("--share", type=float, default=0.3, help="with --served: of its capacity")
    parser.add_argument("--turns", type=int, default=3, help="with --served: of each client")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
