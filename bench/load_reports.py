"""How guidellm, aiperf, locust and `afserve bench serve` are given one load, and what each reports of it.

Every client gets the same: streamed chats of one model, so many at once or at even distances, and all tokens that it
asks for. It knows neither the server nor the truth.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.served import AFSERVE

LIMIT_S = 600.0
# locust times a whole response; its users say themselves when they read what.
LOCUST = Path(__file__).with_name("load_locust.py")
Report = dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens` are those of each answer, `prompt` those of each question, by `tokenizer`, a checkpoint's folder.

    `rate` is requests per second at even distances; 0 keeps `streams` open. `prompts` is a file for clients that make
    none, a JSON line with "messages" for each request; `seed` is for those that make their own.
    """

    url: str
    model: str
    tokenizer: Path
    prompts: Path
    prompt: int
    tokens: int
    requests: int
    streams: int
    rate: float = 0.0
    seed: int = 0


def guidellm(command: list[str], load: Load, folder: Path) -> Report:
    profile = f"kind=constant,rate={load.rate}" if load.rate else f"kind=concurrent,streams={load.streams}"
    asked = [
        "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={load.url},model={load.model}",
        "--profile", profile,
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--data", f"kind=synthetic_text,prompt_tokens={load.prompt},output_tokens={load.tokens}",
        "--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}", "--seed", f"kind=static,value={load.seed}",
        "--output", f"kind=json,path={folder / 'report.json'}",
    ]  # fmt: skip
    # Ten processes that start while the first requests are sent would take a small machine from the server.
    _run([*command, *asked], folder, {"GUIDELLM__MAX_WORKER_PROCESSES": "1"})
    (bench,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    metrics = bench["metrics"]

    def of(name: str, what: str) -> float:
        return float(metrics[name]["successful"][what])

    return {
        "ttft": of("time_to_first_token_ms", "median"),
        "gap": of("inter_token_latency_ms", "median"),
        "e2e": of("request_latency", "median") * 1e3,
        "requests": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"],
        "tokens": round(of("output_token_count", "total_sum")),
    }


def aiperf(command: list[str], load: Load, folder: Path) -> Report:
    pace = ["--concurrency", str(load.streams)]
    if load.rate:
        pace = ["--request-rate", str(load.rate), "--arrival-pattern", "constant"]
    asked = [
        "profile", "--model", load.model, "--url", load.url, "--endpoint-type", "chat", "--streaming", "--ui", "none",
        *pace, "--request-count", str(load.requests),
        "--synthetic-input-tokens-mean", str(load.prompt), "--output-tokens-mean", str(load.tokens),
        "--extra-inputs", "ignore_eos:true",
        "--tokenizer", str(load.tokenizer), "--use-server-token-count", "--artifact-dir", str(folder),
    ]  # fmt: skip
    _run([*command, *asked], folder)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "ttft": found["time_to_first_token"]["p50"],
        "gap": found["inter_token_latency"]["p50"],
        "e2e": found["request_latency"]["p50"],
        "requests": found["request_count"]["avg"],
        "errors": (found.get("error_request_count") or {"avg": 0})["avg"],
        "tokens": round(found["total_output_tokens"]["avg"]),
    }


def locust(command: list[str], load: Load, folder: Path) -> Report:
    asked = ["-f", str(LOCUST), "--headless", "--only-summary", "--host", load.url]
    asked += ["-u", str(load.streams), "-r", str(load.streams)]
    environment = {
        "LOAD_MODEL": load.model,
        "LOAD_TOKENS": str(load.tokens),
        "LOAD_REQUESTS": str(load.requests),
        "LOAD_PERIOD": str(load.streams / load.rate if load.rate else 0),
        "LOAD_STEP": str(1 / load.rate if load.rate else 0),
        "LOAD_PROMPTS": str(load.prompts),
        "LOAD_REPORT": str(folder / "report.json"),
    }
    _run([*command, *asked], folder, environment)
    found: Report = json.loads((folder / "report.json").read_text())
    return found


def afserve(command: list[str], load: Load, folder: Path) -> Report:
    pace = ["--concurrency", str(load.streams)]
    if load.rate:
        pace = ["--rate", str(load.rate), "--arrivals", "constant"]
    asked = [
        "--url", load.url, "--model", load.model, "--json", *pace, "--requests", str(load.requests),
        "--endpoint", "chat", "--prompts", str(load.prompts), "--output-len", str(load.tokens),
        "--out", str(folder / "report.json"),
    ]  # fmt: skip
    _run([*command, *asked], folder)
    (line,) = (folder / "report.json").read_text().splitlines()
    row = json.loads(line)
    return {
        "ttft": row["ttft_ms"]["p50"],
        "gap": row["tpot_ms"]["p50"],
        "e2e": row["e2e_ms"]["p50"],
        "requests": row["completed"],
        "errors": row["sent"] - row["completed"],
        "tokens": row["completion_tokens"],
    }


Client = Callable[[list[str], Load, Path], Report]
CLIENTS: dict[str, Client] = {
    "afserve bench serve": afserve,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "locust": locust,
}


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
