"""Serving a checkpoint that is larger than memory: how fast its experts are read beside the disk's own rate, how much
memory the node takes, and whether its tokens are right.

    python -m bench.make_large_checkpoint --out DIR/big --layers 40
    python -m bench.make_large_checkpoint --out DIR/twin --layers 3
    python -m bench.larger_than_memory --model DIR/big --twin DIR/twin --expert-memory 6GiB --save
    python -m bench.larger_than_memory --model DIR/model.gguf --llama-bench PATH    # beside llama.cpp on the same file

The twin has the first layers of the large one and fits: its tokens with a part of its experts in memory are compared
with those of all of them. Prompts of random tokens go to one colocated node; decoding names other experts at each
step. The disk's own rate is what `afserve doctor --io` says of the folder, before and after, the fastest way of each.
Seconds of a processor for each GB are the node's, with what it computes. The read rate is bytes of experts over the
time in which any was read, with what packing them takes meanwhile. llama.cpp maps the file: its rounds are
`llama-batched-bench` with prompts and answers of the same lengths, with nothing of the file in the page cache before.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from afserve.comm.disk.ways import WAYS, measure
from bench.origin import ROOT, origin
from bench.served import Served, served, started

OUT = ROOT / "bench" / "results" / "larger_than_memory.jsonl"
_READY_S, _ANSWER_S = 600.0, 1800.0
_PLAIN_ROUNDS = 4
Answer = list[tuple[str, float]]


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300, 4000) for _ in range(tokens)] for _ in range(count)]


def ask(here: Served, prompt: list[int], tokens: int) -> Answer:
    """The tokens, each with its log-probability."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer = httpx.post(f"{here.url}/v1/completions", json=body, timeout=_ANSWER_S).raise_for_status()
    said = answer.json()["choices"][0]["logprobs"]
    return list(zip(said["tokens"], said["token_logprobs"], strict=True))


def run(here: Served, asked: list[list[int]], tokens: int, together: int) -> tuple[float, list[Answer]]:
    """Seconds, and the tokens of each."""
    begin = time.monotonic()
    with ThreadPoolExecutor(together) as pool:
        answers = list(pool.map(lambda prompt: ask(here, prompt, tokens), asked))
    return time.monotonic() - begin, answers


def experts(here: Served) -> tuple[dict[str, Any], str]:
    """What the node counts of its memory, and the verdict."""
    status = httpx.get(f"{here.url}/status", headers=here.admin).raise_for_status().json()
    (node,) = [node for node in status["nodes"] if node["role"] == "attention"]
    stat = Path(f"/proc/{node['pid']}/stat").read_text().rpartition(")")[2].split()
    spent = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return {**node["stats"]["experts"], "pid": node["pid"], "cpu_seconds": spent}, status["hot_set"]


class Resident:
    """The most memory that a process took of its own, and of files, watched until `ends`. Bytes."""

    def __init__(self, pid: int) -> None:
        self._status, self._over = Path(f"/proc/{pid}/status"), threading.Event()
        self.most: dict[str, int] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def ends(self) -> dict[str, int]:
        self._over.set()
        self._thread.join(5.0)
        return self.most

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for line in self._status.read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("RssAnon", "RssFile", "VmRSS"):
                    self.most[name] = max(self.most.get(name, 0), int(value.split()[0]) << 10)


def disk_rate(folder: Path) -> float:
    """Bytes per second of the fastest way, the median of short rounds."""
    return max(found.rate for found in measure(folder, ways=WAYS, rounds=_PLAIN_ROUNDS))


def twin_tokens(twin: Path, memory: str) -> dict[str, Any]:
    """Whether they are equal with all experts in memory and with some, and how many were read."""
    asked, answers = prompts(3, 40, 5), []
    flags = ["--model", str(twin), "--colocated", "--kv-tokens", "4096"]
    for further in ([], ["--expert-memory", memory]):
        with served(*flags, *further) as here:
            answers.append(run(here, asked, 32, 3)[1])
            counted, _ = experts(here)
    return {
        "kind": "twin",
        "expert_memory": memory,
        "tokens": sum(map(len, answers[0])),
        "equal": answers[0] == answers[1],
        "experts_read": counted["misses"] + counted["read_ahead"],
    }


def large(
    model: Path, memory: str, rounds: int, streams: int, prompt: int, tokens: int
) -> list[dict[str, Any]]:
    rows = []
    size = sum(path.stat().st_size for path in files_of(model))
    folder = model if model.is_dir() else model.parent
    flags = ["--model", str(model), "--colocated", "--kv-tokens", "4096", "--expert-memory", memory]
    with started(*flags) as here:
        here.wait_ready(_READY_S)
        before, _ = experts(here)
        watched = Resident(before["pid"])
        for turn in range(rounds):
            disk = [disk_rate(folder)]
            start, _ = experts(here)
            seconds, answers = run(here, prompts(streams, prompt, turn), tokens, streams)
            time.sleep(1.0)  # until a heartbeat has the last counts
            end, verdict = experts(here)
            disk.append(disk_rate(folder))
            rows.append(
                row(start, end, verdict, disk, seconds, sum(map(len, answers)))
                | {"streams": streams, "prompt": prompt, "expert_memory": memory, "model_bytes": size}
            )
        most = watched.ends()
    return [one | {f"most_{name}": most[name] for name in sorted(most)} for one in rows]


def files_of(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def peer(bench: Path, model: Path, streams: int, prompt: int, tokens: int) -> dict[str, Any]:
    """One round of llama.cpp, with two threads. `bytes_read` is what its process had to read from the disk, also while
    it started and warmed up, which `seconds` leave out."""
    for path in files_of(model):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sizes = {"-npp": prompt, "-ntg": tokens, "-npl": streams, "-c": streams * (prompt + tokens), "-t": 2}
    flags = [word for name, size in sizes.items() for word in (name, str(size))]
    command = [str(bench), "-m", str(model), "--output-format", "jsonl", *flags]
    before = _read_by_children()
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWER_S).stdout
    read = _read_by_children() - before
    result = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    seconds = result["t_pp"] + result["t_tg"]
    return {
        "kind": "llama.cpp",
        "tokens": streams * tokens,
        "seconds": round(seconds, 2),
        "prompt_seconds": round(result["t_pp"], 2),
        "bytes_read": read,
        "streams": streams,
        "prompt": prompt,
        "model_bytes": sum(path.stat().st_size for path in files_of(model)),
    }


def _read_by_children() -> int:
    """Bytes that processes which this one has waited for had to read from disks."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock * 512


def row(
    start: dict[str, Any], end: dict[str, Any], verdict: str, disk: list[float], seconds: float, tokens: int
) -> dict[str, Any]:
    did = {name: end[name] - start[name] for name in end if name not in ("pid", "capacity", "resident")}
    rate = did["bytes_read"] / did["read_seconds"]
    return {
        "kind": "large",
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "bytes_read": did["bytes_read"],
        "read_rate": rate,
        "cpu_seconds_per_gb": did["cpu_seconds"] / did["bytes_read"] * 1e9,
        "read_share_of_time": did["read_seconds"] / seconds,
        "disk_rates": disk,
        "share_of_disk": rate / median(disk),
        "found_in_memory": did["hits"] / (did["hits"] + did["misses"]),
        "read_ahead": did["read_ahead"],
        "read_ahead_used": did["ahead_used"],
        "unreadable": did["unreadable"],
        "hot_set": verdict,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model that is larger than memory.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--twin", type=Path)
    parser.add_argument("--expert-memory", default="6GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-batched-bench, of a GGUF file")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {OUT.relative_to(ROOT)}")
    asked = parser.parse_args()
    sizes = asked.streams, asked.prompt, asked.tokens
    if asked.twin:
        keep([twin_tokens(asked.twin, "512MiB")], asked.save)
    keep(large(asked.model, asked.expert_memory, asked.rounds, *sizes), asked.save)
    for _ in range(asked.rounds if asked.llama_bench else 0):
        keep([peer(asked.llama_bench, asked.model, *sizes)], asked.save)


def keep(made: list[dict[str, Any]], save: bool) -> None:
    """As soon as they are known: a later part may end before its time."""
    for one in made:
        print(json.dumps(one), flush=True)
    if save:
        with OUT.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(origin() | one) + "\n" for one in made)


if __name__ == "__main__":
    main()
