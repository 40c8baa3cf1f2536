"""Blocks that lie only on another host's disk: the first token beside computing them, over a cable and a slow one.

    python -m bench.kv_elsewhere [--rounds 8] [--tokens 3000] [--save]

Two network namespaces joined by a virtual cable, as two hosts, each with one node of the bundled model. The first one
has written prompts to its disk, and its cache has forgotten them. The second one has a request for each: pulled from
there, and the same length of another prompt computed, in turns. What tells pulling from computing is the product's own
(`KvMoves`), with the rates that it measures. The files are out of the page cache before each. A link of
1 Mbit/s, where tc(8) has token buckets, is where pulling does not pay. Needs root and ip(8); run it on a quiet machine.
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.kv.source import KvSource
from afserve.comm.transports.entrance import listen_on
from afserve.config import EngineConfig, ModelSource
from afserve.credentials import NOBODYS
from afserve.engine.build import colocated
from afserve.engine.kv.moving.open import KvPlace, open_kv
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.member import attention_life
from bench.kv_tiers import forget
from bench.m2n import FORK
from bench.m2n_hosts import ADDRESSES, enter, possible, two_hosts
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "kv_tiers.jsonl"
NANO = ROOT / "configs" / "nano"
SLOW = "1mbit"
BLOCK = 16
LONGEST = 60.0  # seconds of anything here
_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
Prompt = tuple[int, ...]


class Host:
    """One node in a namespace. Its cache holds three prompts of `tokens`, its disk all."""

    def __init__(self, end: int, tokens: int, folder: str) -> None:
        blocks = 3 * -(-tokens // BLOCK) * 32 // 31 + 64
        engine = EngineConfig(
            max_model_len=8192,
            kv_blocks=blocks,
            block_size=BLOCK,
            max_batch_tokens=512,
            micro_batches=1,
            kv_ssd=folder,
            kv_ssd_size="2GiB" if folder else "",
        )
        self.node = colocated(ModelSource(str(NANO), "nano"), engine)
        self.wires: list[SocketWires] = []
        listener, said = listen_on(ADDRESSES[end]), self.wires.append
        source = ModelSource(str(NANO), "nano")
        place = KvPlace(end, ADDRESSES[end], NOBODYS, engine, source, _silent, print, self._ring, said)
        self.kv, self._number = open_kv(self.node, listener, place), 0

    def _ring(self) -> None:
        self.wires[0].ring()

    @property
    def address(self) -> str:
        return self.wires[0].address

    def turn(self) -> dict[int, int]:
        """Tokens found of the prompts whose first token came, by request."""
        for request in self.kv.turn():
            self.node.submit(request)
        if not self.node.busy:
            if not self.kv.eager:
                self.wires[0].sleep(0.001)
            return {}
        return {event.handle: event.cached_tokens for event in self.node.step()}

    def ask(self, prompt: Prompt, source: KvSource | None = None) -> tuple[float, int]:
        """Seconds to its token, and tokens that were found."""
        self._number += 1
        began, request = time.perf_counter(), GenerationRequest(self._number, prompt, _ONE)
        if not ((source is not None and self.kv.pull(request, source)) or self.kv.restore(request)):
            self.node.submit(request)
        while time.perf_counter() - began < LONGEST:
            if (found := self.turn().get(self._number)) is not None:
                return time.perf_counter() - began, found
        raise SystemExit(f"bench.kv_elsewhere: a request took longer than {LONGEST:g} s")


def _silent(line: str) -> None:
    """Lines for a run's log."""


def drawn(draw: random.Random, count: int) -> Prompt:
    return tuple(draw.randrange(3, 2000) for _ in range(count))


def owner(control: Connection, host: str, prompts: Sequence[Prompt], folder: str) -> None:
    enter(host)
    torch.set_num_threads(1)
    here = Host(0, len(prompts[0]), folder)
    draw = random.Random(2)
    for prompt in (*prompts, *(drawn(draw, len(prompts[0])) for _ in range(4))):
        here.ask(prompt)
    until = time.monotonic() + LONGEST
    while here.kv.busy and time.monotonic() < until:
        here.turn()
    control.send(here.address)
    while not control.poll():
        here.turn()
        for _ in range(100):  # while nobody asks for anything
            if control.poll() or here.kv.busy or here.kv.eager:
                break
            here.wires[0].sleep(0.01)
    here.kv.close()


def asker(control: Connection, host: str, prompts: Sequence[Prompt], folder: str, address: str) -> None:
    """Sends (seconds pulled, tokens found, seconds computed) of each prompt."""
    enter(host)
    torch.set_num_threads(1)
    here, draw = Host(1, len(prompts[0]), ""), random.Random(3)
    source = KvSource(attention_life(0, 0), 0, address)
    for _ in range(3):
        here.ask(drawn(draw, len(prompts[0])))
    for number, prompt in enumerate(prompts):
        for data in Path(folder).rglob("data"):
            forget(data)
        pulled: tuple[float, int] = (0.0, 0)
        computed = 0.0
        for elsewhere in (True, False) if number % 2 else (False, True):
            if elsewhere:
                pulled = here.ask(prompt, source)
            else:
                computed, _ = here.ask(drawn(draw, len(prompt)))
        control.send((*pulled, computed))
    control.send(None)
    here.kv.close()


def rows(rounds: int, tokens: int) -> Iterator[dict[str, object]]:
    draw = random.Random(1)
    for link in ("cable", SLOW):
        prompts = [drawn(draw, tokens) for _ in range(rounds + 1)]
        with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
            if link != "cable" and not slowed(hosts, link):
                continue
            mine, theirs = FORK.Pipe()
            first = FORK.Process(target=owner, args=(theirs, hosts[0], prompts, folder), daemon=True)
            first.start()
            assert mine.poll(LONGEST), "the first host does not start"
            address = mine.recv()
            asks, other = FORK.Pipe()
            args = (other, hosts[1], prompts, folder, address)
            second = FORK.Process(target=asker, args=args, daemon=True)
            second.start()
            found: list[tuple[float, int, float]] = []
            try:
                while asks.poll(LONGEST) and (one := asks.recv()) is not None:
                    found.append(one)
            finally:
                mine.send(None)
                for process in (second, first):
                    process.join(5.0)
                    process.kill()
                    process.join()
        yield row(link, tokens, found)


def row(link: str, tokens: int, found: Sequence[tuple[float, int, float]]) -> dict[str, object]:
    """The first pull is apart: no rate is measured before it."""
    first, *later = found
    computed = statistics.median(one for *_, one in found)
    pulled = [seconds for seconds, *_ in later]
    return {
        "what": "elsewhere",
        "link": link,
        "tokens": tokens,
        "rounds": len(later),
        "found": statistics.median(count for _, count, _ in later),
        "pulled_ms": round(1e3 * statistics.median(pulled), 2),
        "computed_ms": round(1e3 * computed, 2),
        "of_computing": round(statistics.median(pulled) / computed, 3),
        "worst_of_computing": round(max(pulled) / computed, 3),
        "first_of_computing": round(first[0] / computed, 3),
    }


def slowed(hosts: tuple[str, str], rate: str) -> bool:
    """Whether this kernel can make the cable slow."""
    worked = True
    for name in hosts:
        words = (
            f"ip netns exec {name} tc qdisc add dev v{name} root tbf rate {rate} burst 32kbit latency 400ms"
        )
        worked &= subprocess.run(words.split(), capture_output=True, check=False).returncode == 0
    return worked


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_elsewhere", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3000, help="of each prompt")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    if not possible():
        print("not measured: network namespaces need Linux, root and ip(8)")
        return
    for found in rows(options.rounds, options.tokens):
        print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
        if options.save:
            with Path(options.save).open("a") as file:
                file.write(json.dumps({**found, **origin()}) + "\n")


if __name__ == "__main__":
    main()
