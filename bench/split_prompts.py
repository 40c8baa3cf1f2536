"""Time to a prompt's last token at 1 to 8 prefill nodes: the engine's split and waits, layers of known length.

    python -m bench.split_prompts            --json: one object a line; --save: keep the rows

Nothing is measured of this machine: a layer of a chunk only moves the clock forward, and a slice arrives after the
bytes before it and its own, so the numbers are the same everywhere. Layers take as long however much context a chunk
has, and however many nodes ask the expert nodes: it shows what waiting for others' layers costs, and nothing else.
`predicted` is what decides over how many nodes a prompt is split.
"""

import argparse
import heapq
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from afserve.comm.kv.messages import Among, Message, Prefill
from afserve.comm.kv.sharing import SharedPrompt, Sharing
from afserve.comm.kv.split import SplitMember, split_over
from afserve.engine.kv.moving.prompt_place import PromptQueue, SplitPrompt
from bench.origin import ROOT, origin

BLOCK = 16
LATENCY = 50e-6  # seconds of a message


@dataclass(frozen=True)
class Case:
    """`layer` seconds for a layer of a chunk; `kept` bytes of a token in a layer; `link` bytes per second of a node."""

    name: str
    layers: int
    chunk: int
    layer: float
    kept: int
    link: float
    tokens: int


class Clocked:
    """What happens when: calls at times, in the order of these."""

    def __init__(self) -> None:
        self.now, self._calls, self._number = (
            0.0,
            list[tuple[float, int, Callable[[], None]]](),
            itertools.count(),
        )

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (when, next(self._number), call))

    def run(self) -> None:
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()


class Node:
    """A prefill node: what it computes when, and the wire that it sends over."""

    def __init__(self, index: int, case: Case, clock: Clocked, nodes: "list[Node]") -> None:
        self._case, self._clock, self._nodes, self._free = case, clock, nodes, 0.0
        self._index = index
        self.sharing = Sharing(self._send, int, 0, BLOCK * case.kept * case.layers)
        self._bytes = memoryview(bytes(case.chunk * case.kept))
        self.ended = 0.0
        self._work: Iterator[float] | None = None
        self._busy = False

    def _send(self, peer: int, message: Message) -> None:
        assert isinstance(message, Among)
        self._free = max(self._free, self._clock.now) + len(message.body) / self._case.link
        self._clock.at(self._free + LATENCY, lambda: self._nodes[peer].heard(self._index, message))

    def heard(self, peer: int, message: Among) -> None:
        self.sharing.heard(peer, message, self._clock.now)
        if self.sharing.started:
            self._work = self.computes(self.sharing.started.pop())
        self.go_on()

    def go_on(self) -> None:
        """Until it computes a layer, or waits for others."""
        if self._work is None or self._busy:
            return
        seconds = next(self._work, None)
        if seconds is None:
            self._work, self.ended = None, self._clock.now
        elif seconds:
            self._busy = True
            self._clock.at(self._clock.now + seconds, self._computed)

    def _computed(self) -> None:
        self._busy = False
        self.go_on()

    def computes(self, shared: SharedPrompt) -> Iterator[float]:
        """As the scheduler and a step do: seconds of a layer, 0 where it waits for others. Keys and values of a layer
        are there before the rest of it."""
        computed = shared.split.start
        while computed < shared.split.end:
            own = shared.split.own(computed)
            assert own is not None
            needs = range(computed // BLOCK, own.start // BLOCK)
            while not came(shared, 0, range(computed, own.start)):
                yield 0.0
            for layer in range(self._case.layers):
                while not came(shared, layer, range(computed, own.start)):
                    yield 0.0
                shared.take(layer, needs)
                blocks = range(own.start // BLOCK, own.stop // BLOCK)
                if shared.split.takers(shared.split.chunk_at(own.start)):
                    shared.send(layer, blocks, own, self._bytes[: len(own) * self._case.kept])
                yield self._case.layer * len(own) / self._case.chunk
            computed = own.stop


def came(shared: SharedPrompt, layer: int, tokens: range) -> bool:
    arrived = shared.arrived(layer, tokens, BLOCK)
    shared.wait_for(arrived)
    return arrived.whole


def seconds(case: Case, parts: int) -> float:
    """Until the lead has computed the last token."""
    if parts == 1:
        return case.tokens / case.chunk * case.layers * case.layer
    clock, nodes = Clocked(), list[Node]()
    nodes += [Node(index, case, clock, nodes) for index in range(parts)]
    split = split_over(case.tokens, 0, parts, case.chunk, BLOCK)
    assert split is not None, "too short to be split"
    members = tuple(SplitMember(0, str(index)) for index in range(parts))
    nodes[0].sharing.propose(split, members, Prefill(1, 1, 0, tuple(range(case.tokens))), 0.0)
    clock.run()
    assert all(node.ended for node in nodes), "a node waits for ever"
    return nodes[0].ended


def cases() -> Iterator[Case]:
    """A latent cache's row and 8 heads of 128 in bfloat16, over 10 and 1 GB/s."""
    for tokens in (8192, 32768):
        yield Case("576 numbers", 61, 2048, 6e-3, 1152, 10e9, tokens)
    yield Case("8 heads", 61, 2048, 6e-3, 4096, 10e9, 32768)
    yield Case("8 heads", 61, 2048, 6e-3, 4096, 1e9, 32768)


def measured(case: Case) -> Iterator[dict[str, object]]:
    alone = seconds(case, 1)
    rate = case.tokens / alone
    for parts in (1, 2, 4, 8):
        took = seconds(case, parts) if case.tokens >= parts * BLOCK else alone
        prompt = SplitPrompt(
            case.tokens, case.chunk, case.layers, case.tokens * case.layers * case.kept / case.link
        )
        predicted = prompt.seconds([PromptQueue(0.0, rate)] * parts, rate) - prompt.transfer
        yield {
            **asdict(case),
            "nodes": parts,
            "seconds": round(took, 3),
            "of_alone": round(took / alone, 3),
            "predicted": round(predicted, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    for case in cases():
        for row in measured(case):
            print(
                json.dumps(row) if asked.json else "  ".join(f"{name} {value}" for name, value in row.items())
            )
            if asked.save:
                with (ROOT / "bench/results/split_prompts.jsonl").open("a") as file:
                    file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
