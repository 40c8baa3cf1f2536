"""What drafts from texts win here and in llama.cpp, on the same weights and prompts, each beside its rate without them.

    python -m bench.draft_peers --model DIR [--llama-server BIN --gguf FILE] [--vllm-python PY] [--save]

Every engine is a server that stays: `afserve up --colocated`, llama.cpp's `llama-server` built for this machine, and
vLLM's for CPUs, which runs in a Python of its own.
They take turns, `--rounds` times behind one that warms up. Prompts are read before and kept by all, so that rates are
of answers; ratios are by round, to the same program without drafts. `code` and `copy` are texts of `bench.drafts`. A
row says, too, which share of its answers have the text of those without drafts.

With `--synthetic L` drafts of four tokens are right as often as gives L tokens a step, whatever they say: here by
suffixes of the answers that were given a moment ago and in llama.cpp by pairs of tokens, whose answers are no text
then. vLLM refuses it on CPUs ("Synthetic acceptance not supported with CPU sampling").
All engines make each answer twice; the second time counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import httpx

from bench.drafts import Prompts, Texts
from bench.origin import ROOT, origin
from bench.served import free_port, served

RESULTS = ROOT / "bench" / "results" / "draft_peers.jsonl"
OURS, LLAMA, VLLM = "afserve", "llama.cpp", "vLLM"
PLAIN = "off"
DRAFTED = 4  # tokens of a synthetic draft
_OURS = ("ngram", "suffix")
_LLAMA = {
    "ngram-simple": "--spec-type ngram-simple",
    "ngram-simple 4:16": "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 16",
    "ngram-map-k 4:16": "--spec-type ngram-map-k --spec-ngram-map-k-size-n 4 --spec-ngram-map-k-size-m 16",
    "ngram-mod": "--spec-type ngram-mod",
}
"""As they come, and told to look for as few tokens as ours do."""
_PAIRS = f"--spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m {DRAFTED}"
_SYNTHETIC = f"--spec-type ngram-simple {_PAIRS} --spec-synth-len"
_VLLM_LOOKS_FOR = 4  # tokens at most, as ours does
_SETTLE_S, _WAIT_S = 0.3, 120.0
_VLLM_READY_S = 300.0
_VLLM_MEMORY = "0.2"  # of the host's; by default it starts only where nearly all of it is free
_REPORTED_S = 1.2  # a node has told its counts by then


class Peer(Protocol):
    program: str
    draft: str

    def answer(self, prompt: list[int], tokens: int) -> str: ...

    def counts(self) -> tuple[int, int]:
        """Tokens that were drafted and right since it started."""
        ...


class Completions:
    """A server of OpenAI's protocol that counts drafts in /metrics, each counter named `prefix` and what vLLM calls
    it."""

    def __init__(
        self,
        program: str,
        draft: str,
        url: str,
        prefix: str,
        admin: Mapping[str, str],
        asked: Mapping[str, str],
    ) -> None:
        """`asked` is what every request has, too."""
        self.program, self.draft, self._prefix, self._asked = program, draft, prefix, asked
        self._client = httpx.Client(base_url=url, timeout=_WAIT_S, headers=admin)

    def answer(self, prompt: list[int], tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **self._asked}
        said = self._client.post("/v1/completions", json=body).raise_for_status().json()
        return str(said["choices"][0]["text"])

    def counts(self) -> tuple[int, int]:
        time.sleep(_REPORTED_S)
        told = self._client.get("/metrics").raise_for_status().text
        of = f"{self._prefix}spec_decode_num"
        return _summed(told, f"{of}_draft_tokens_total"), _summed(told, f"{of}_accepted_tokens_total")


class Llama:
    program = LLAMA

    def __init__(self, url: str, draft: str) -> None:
        self.draft = draft
        self._client = httpx.Client(base_url=url, timeout=_WAIT_S)
        self._counted: list[tuple[int, int]] = []

    def answer(self, prompt: list[int], tokens: int) -> str:
        body = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
        }  # fmt: skip
        said = self._client.post("/completion", json=body).raise_for_status().json()
        if said["tokens_predicted"] != tokens:
            raise RuntimeError(f"llama.cpp made {said['tokens_predicted']} tokens of {tokens}")
        timings = said["timings"]
        self._counted.append((timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)))
        return str(said["content"])

    def counts(self) -> tuple[int, int]:
        return sum(drafted for drafted, _ in self._counted), sum(right for _, right in self._counted)


def _summed(metrics: str, name: str) -> int:
    return int(sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)))


@contextmanager
def peer_server(
    command: Sequence[str], seconds: float = _WAIT_S, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Its address. Raises RuntimeError where it does not get ready in so many seconds."""
    port, program = free_port(), command[0]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env={**os.environ, **env}
        )
        try:
            until = time.monotonic() + seconds
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(
                        f"{program} is not ready: {log.read().decode(errors='replace')[-2000:]}"
                    )
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


def turn(peer: Peer, prompts: Prompts, tokens: int) -> tuple[float, list[str]]:
    """All prompts at once: tokens per second, and the answers."""
    time.sleep(_SETTLE_S)
    with ThreadPoolExecutor(len(prompts)) as threads:
        began = time.perf_counter()
        said = list(threads.map(lambda prompt: peer.answer(prompt, tokens), prompts))
        return len(prompts) * tokens / (time.perf_counter() - began), said


def measure(
    peers: Sequence[Peer], kind: str, batch: int, options: argparse.Namespace, texts: Texts
) -> list[dict[str, object]]:
    """A row a peer. Raises RuntimeError where an answer of ours is another one than without drafts."""
    found: dict[Peer, list[tuple[float, list[str]]]] = {peer: [] for peer in peers}
    before = {peer: peer.counts() for peer in peers}
    for number in range(options.rounds + 1):  # the first one warms up
        prompts = texts.prompts(kind, batch)
        first = number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            turn(peer, prompts, options.tokens if options.synthetic else 1)
            found[peer].append(turn(peer, prompts, options.tokens))
    rows = []
    for peer, turns in found.items():
        plain = next(found[other] for other in peers if (other.program, other.draft) == (peer.program, PLAIN))
        pairs = list(zip(turns, plain, strict=True))
        same = statistics.mean(
            a == b for (_, mine), (_, other) in pairs for a, b in zip(mine, other, strict=True)
        )
        if same < 1 and peer.program == OURS:
            raise RuntimeError(f"{peer.draft}: other answers than without drafts, {kind} at {batch}")
        ratios = sorted(rate / other for (rate, _), (other, _) in pairs[1:])
        drafted, accepted = (now - then for now, then in zip(peer.counts(), before[peer], strict=True))
        rows.append(
            {
                "bench": "draft_peers", "model": options.name, "numbers": options.numbers, "text": kind,
                "batch": batch, "engine": peer.program, "draft": peer.draft, "synthetic": options.synthetic,
                "tokens_per_s": round(statistics.median(rate for rate, _ in turns[1:]), 1),
                "ratio": round(statistics.median(ratios), 3), "ratio_low": round(ratios[0], 3),
                "ratio_high": round(ratios[-1], 3), "drafted": drafted,
                "accepted": accepted, "same_answers": round(same, 3),
                "rounds": options.rounds, "tokens": options.tokens, "threads": options.threads,
            }
        )  # fmt: skip
    return rows


def _peers(options: argparse.Namespace, stack: ExitStack) -> list[Peer]:
    most = max(map(int, options.batch.split(",")))
    few = (
        ()
        if options.numbers == "bf16"
        else ("--expert-dtype", options.numbers, "--dense-dtype", options.numbers)
    )
    flags = ("--model", options.model, "--colocated", "--threads", str(options.threads), *few)
    theirs = ["-m", options.gguf, "-t", str(options.threads), "-tb", str(options.threads), "-np", str(most)]
    theirs += ["-c", str(most * 1024), "--cache-ram", "0"]
    synthetic = {
        "method": "suffix", "num_speculative_tokens": DRAFTED, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": options.synthetic,
    }  # fmt: skip
    ours = {PLAIN: ("--draft", PLAIN), **{name: ("--draft", name) for name in _OURS}}
    others = {PLAIN: "", **_LLAMA}
    if options.synthetic:
        ours = {PLAIN: ours[PLAIN], "suffix": ("--speculative-config", json.dumps(synthetic))}
        others = {PLAIN: "", "ngram-simple": f"{_SYNTHETIC} {options.synthetic}"}
    peers: list[Peer] = []
    for name, own in ours.items():
        up = stack.enter_context(served(*flags, *own))
        peers.append(Completions(OURS, name, up.url, "afserve_", up.admin, {}))
    if options.llama_server:
        for name, flag in others.items():
            url = stack.enter_context(peer_server([options.llama_server, *theirs, *flag.split()]))
            peers.append(Llama(url, name))
    if options.vllm_python:
        peers += _vllm_peers(options, stack, most)
    return peers


def _vllm_peers(options: argparse.Namespace, stack: ExitStack, most: int) -> Iterator[Peer]:
    """On as many cores as ours have threads. It keeps no core for its front end."""
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    drafts = {
        "method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": _VLLM_LOOKS_FOR,
        "prompt_lookup_min": 2,
    }  # fmt: skip
    for name, own in {PLAIN: (), "ngram": ("--speculative-config", json.dumps(drafts))}.items():
        command = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
        command += ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", str(most)]
        command += ["--gpu-memory-utilization", _VLLM_MEMORY, *own]
        url = stack.enter_context(peer_server(command, _VLLM_READY_S, env))
        yield Completions(VLLM, name, url, "vllm:", {}, {"model": options.model})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_peers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="a folder with tokens from 0 to 2,047 at least")
    parser.add_argument("--llama-server", help="llama.cpp's; without it ours alone are measured")
    parser.add_argument("--gguf", help="the same weights for it, in bf16 or what --numbers says")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM for CPUs; bf16 only")
    parser.add_argument(
        "--numbers", default="bf16", choices=("bf16", "int4", "int8"), help="of all linear maps"
    )
    parser.add_argument("--texts", default="code,copy")
    parser.add_argument("--batch", default="1,8", help="requests at once")
    parser.add_argument("--synthetic", type=float, default=0.0, metavar="L", help="tokens a step, 1 to 5")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if bool(options.llama_server) != bool(options.gguf):
        parser.error("--llama-server and --gguf go together")
    if options.vllm_python and options.numbers != "bf16":
        parser.error("--vllm-python goes with --numbers bf16 alone")
    if options.vllm_python and options.synthetic:
        parser.error("--vllm-python goes without --synthetic: vLLM has no synthetic acceptance on CPUs")
    options.name = Path(options.model).name
    with ExitStack() as stack:
        peers, texts = _peers(options, stack), Texts(options.seed)
        for kind in options.texts.split(","):
            for batch in map(int, options.batch.split(",")):
                for row in measure(peers, kind, batch, options, texts):
                    print(_line(row), flush=True)
                    if options.save:
                        with RESULTS.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row | origin()) + "\n")


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['text']:5} {row['batch']:3}  {row['engine']:9} {row['draft']:18} {row['tokens_per_s']:9} tok/s  "
        f"x {row['ratio']:<6} ({row['ratio_low']} to {row['ratio_high']})  {row['accepted']} of {row['drafted']} "
        f"right, {row['same_answers']:.0%} the same answers"
    )


if __name__ == "__main__":
    main()
