"""`python -m bench.load_clients`: outside load clients against a scripted server, whose delays are known.

What guidellm, aiperf and locust say of the first token, the gap between tokens and the whole request, beside the
script, and beside `afserve bench serve` in the same run. A client that lies in another environment is given as
`--client NAME=COMMAND`; one that is found nowhere is said and left out.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.origin import ROOT, origin
from bench.scripted_server import Script, serving
from bench.served import AFSERVE

OUT = ROOT / "bench" / "results" / "load_clients.jsonl"
TOKENIZER = ROOT / "configs" / "nano"
LIMIT_S = 600.0
WANTED = 0.05  # of the truth
# locust times a whole response; its users say themselves when they read what.
LOCUST = Path(__file__).with_name("load_locust.py")


def guidellm(command: list[str], url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    asked = [
        "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={url}",
        "--profile", f"kind=concurrent,streams={options.streams}",
        "--constraint", f"kind=max_requests,count={options.requests}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={options.tokens}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--output", f"kind=json,path={folder / 'report.json'}",
    ]  # fmt: skip
    _run([*command, *asked], folder)
    (bench,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    metrics = bench["metrics"]

    def median(name: str) -> float:
        return float(metrics[name]["successful"]["median"])

    return {
        "ttft": median("time_to_first_token_ms"),
        "gap": median("inter_token_latency_ms"),
        "e2e": median("request_latency") * 1e3,
        "requests": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"],
    }


def aiperf(command: list[str], url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    asked = [
        "profile", "--model", "scripted", "--url", url, "--endpoint-type", "chat", "--streaming", "--ui", "none",
        "--concurrency", str(options.streams), "--request-count", str(options.requests),
        "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(options.tokens),
        "--tokenizer", str(TOKENIZER), "--use-server-token-count", "--artifact-dir", str(folder),
    ]  # fmt: skip
    _run([*command, *asked], folder)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "ttft": found["time_to_first_token"]["p50"],
        "gap": found["inter_token_latency"]["p50"],
        "e2e": found["request_latency"]["p50"],
        "requests": found["request_count"]["avg"],
        "errors": (found.get("error_request_count") or {"avg": 0})["avg"],
    }


def locust(command: list[str], url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    asked = ["-f", str(LOCUST), "--headless", "--only-summary", "--host", url]
    asked += ["-u", str(options.streams), "-r", str(options.streams)]
    environment = {
        "LOAD_TOKENS": str(options.tokens),
        "LOAD_REQUESTS": str(options.requests),
        "LOAD_REPORT": str(folder / "report.json"),
    }
    _run([*command, *asked], folder, environment)
    found: dict[str, float] = json.loads((folder / "report.json").read_text())
    return found


def afserve(command: list[str], url: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    asked = [
        "--url",
        url,
        "--json",
        "--concurrency",
        str(options.streams),
        "--requests",
        str(options.requests),
    ]
    asked += ["--input-len", "32", "--output-len", str(options.tokens), "--out", str(folder / "report.json")]
    _run([*command, *asked], folder)
    (line,) = (folder / "report.json").read_text().splitlines()
    row = json.loads(line)
    return {
        "ttft": row["ttft_ms"]["p50"],
        "gap": row["tpot_ms"]["p50"],
        "e2e": row["e2e_ms"]["p50"],
        "requests": row["completed"],
        "errors": row["sent"] - row["completed"],
    }


Client = Callable[[list[str], str, argparse.Namespace, Path], dict[str, float]]
CLIENTS: dict[str, Client] = {
    "afserve bench serve": afserve,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "locust": locust,
}


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Raises RuntimeError with what it printed last."""
    with (folder / "printed").open("w+") as printed:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=printed,
            stderr=printed,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            printed.seek(0)
            raise RuntimeError(
                f"{shlex.join(command[:6])} ended with {done.returncode}: {printed.read()[-2000:]}"
            )


def command_of(name: str, given: dict[str, str]) -> list[str] | None:
    """How this client is started; None where it is not installed."""
    if name in given:
        return shlex.split(given[name])
    if name == "afserve bench serve":
        return [*AFSERVE, "bench", "serve"]
    if importlib.util.find_spec(name) is not None:
        return [sys.executable, "-m", name]
    found = shutil.which(name)
    return None if found is None else [found]


def row_of(name: str, found: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    """Its medians in milliseconds, and how far each is from the script."""
    first, gap = options.first * 1e3, options.gap * 1e3
    truth = {"ttft": first, "gap": gap, "e2e": first + gap * (options.tokens - 1)}
    return {
        "bench": "load_clients",
        "client": name,
        **{key: getattr(options, key) for key in ("streams", "requests", "tokens", "first", "gap")},
        "told": {key: round(value, 3) for key, value in found.items()},
        "errors": {key: round(found[key] / value - 1, 4) for key, value in truth.items()},
        "exact": found["requests"] == options.requests and not found["errors"],
    }


def main() -> int:
    options = _parser().parse_args()
    given = dict(pair.partition("=")[::2] for pair in options.client)
    if unknown := set(given) - set(CLIENTS):
        print(f"--client: {', '.join(unknown)}: none of {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    rows = []
    for name in options.only or CLIENTS:
        command = command_of(name, given)
        if command is None:
            print(f"{name:20} not installed; give it as --client '{name}=COMMAND'")
            continue
        with tempfile.TemporaryDirectory() as folder, serving(Script(options.first, options.gap)) as url:
            row = row_of(name, CLIENTS[name](command, url, options, Path(folder)), options)
        rows.append({**row, **origin()})
        said = "  ".join(f"{key} {error:+.1%}" for key, error in row["errors"].items())
        within = max(abs(error) for error in row["errors"].values()) <= WANTED
        print(
            f"{name:20} {said}  counts {'exact' if row['exact'] else 'WRONG'}"
            f"  {'within' if within else 'NOT within'} {WANTED:.0%}",
            flush=True,
        )
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load_clients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--client", action="append", default=[], metavar="NAME=COMMAND", help="how a client is started"
    )
    parser.add_argument("--only", action="append", default=[], choices=sorted(CLIENTS), metavar="NAME")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--first", type=float, default=0.2, help="seconds before the first token")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between tokens")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
