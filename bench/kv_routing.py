"""Where requests go, simulated on a real trace: round robin, the gateway's router, and one that knows everything.

    python -m bench.kv_routing --trace ../shared/data/request_traces/mooncake_conversation_trace.jsonl

Attention nodes are scripted: each computes prompts one after the other at a fixed rate, keeps blocks of 512 tokens in
an LRU cache, and runs a request for its output tokens. The rate is that at which round robin keeps nodes busy for 80 %
of the time. `fetching` nodes get missing blocks from another node in a twentieth of the time that computing them takes.
The oracle of hits is one LRU cache as large as all nodes' together. The router is the gateway's own code, asked with
what a gateway knows: each node tells it every second which beginnings came into its cache and which left it. `untold`
routers have only what they gave before.
"""

import argparse
import heapq
import json
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afserve.control.affinity import Affinity
from afserve.control.node.prefixes import SECONDS
from afserve.engine.kv.prefix_keys import keys_of
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "kv_routing.jsonl"
TRACE = ROOT.parent / "shared/data/request_traces/mooncake_conversation_trace.jsonl"
BLOCK = 512  # tokens of the trace's blocks
ENGINE_BLOCK = 16  # of a node's
TPOT = 0.02
FETCHED = 0.05  # of the time that computing takes
BUSY = 0.8


@dataclass(frozen=True, slots=True)
class Asked:
    """Seconds, tokens, names of the prompt's blocks."""

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]


class Cache:
    """LRU over blocks; the tail of a prompt goes before its head. Its `changes` are blocks that came (True) or went
    since they were last taken."""

    def __init__(self, blocks: int) -> None:
        self._most, self._kept = blocks, OrderedDict[int, None]()
        self.changes: dict[int, bool] = {}

    def run(self, blocks: Sequence[int]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in self._kept), len(blocks))

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block not in self._kept:
                self.changes[block] = True
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            gone, _ = self._kept.popitem(last=False)
            self.changes[gone] = False


@dataclass
class Node:
    cache: Cache
    free: float = 0.0  # when it has computed every prompt that it was given
    prompts: list[tuple[float, int]] = field(default_factory=list)  # until when, tokens
    running: list[float] = field(default_factory=list)  # until when

    def pass_to(self, now: float) -> None:
        self.prompts = [one for one in self.prompts if one[0] > now]
        while self.running and self.running[0] <= now:
            heapq.heappop(self.running)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds to first tokens; blocks that were found, on the node or on any; share of time that nodes were busy."""

    first: tuple[float, ...]
    hits: int
    busy: float

    @property
    def p50(self) -> float:
        return statistics.median(self.first)


@dataclass(frozen=True, slots=True)
class Choice:
    """A node, the tokens of the prompt that the router thinks it has to compute, and whom to fetch from."""

    node: int
    missing: int = 0
    source: int | None = None


Router = Callable[[int, Asked, Sequence[Node]], Choice]


def read(path: Path, most: int | None = None) -> list[Asked]:
    lines = path.read_text(encoding="utf-8").splitlines()[:most]
    rows = (json.loads(line) for line in lines)
    return [
        Asked(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        for row in rows
    ]


def round_robin() -> Router:
    return lambda turn, asked, nodes: Choice(turn % len(nodes))


class Keys:
    """The keys of the beginnings that end in each block, in the engine's blocks of `ENGINE_BLOCK` tokens."""

    def __init__(self) -> None:
        self._of: dict[int, list[int]] = {}

    def prompt(self, asked: Asked) -> list[int]:
        """Token ids that stand for its blocks, the last one of which may be shorter."""
        prompt: list[int] = []
        for block in asked.blocks:
            prompt += [block] * BLOCK
        if asked.blocks[-1] not in self._of:
            self._of.update((block, []) for block in asked.blocks if block not in self._of)
            for key, end in keys_of(prompt, ENGINE_BLOCK):
                mine = self._of[asked.blocks[(end - 1) // BLOCK]]
                if key not in mine:
                    mine.append(key)
        return prompt

    def of(self, blocks: Iterable[int]) -> list[int]:
        return [key for block in blocks for key in self._of[block]]


def gateway(*, fetching: bool, told: bool = True) -> Router:
    """The router that serves, told what a gateway is told."""
    affinity, keys = Affinity(ENGINE_BLOCK), Keys()
    said: dict[int, float] = {}

    def pick(turn: int, asked: Asked, nodes: Sequence[Node]) -> Choice:
        for index, node in enumerate(nodes):
            if told and asked.at - said.get(index, 0.0) >= SECONDS:
                changes, node.cache.changes, said[index] = node.cache.changes, {}, asked.at
                came = keys.of(block for block, here in changes.items() if here)
                went = keys.of(block for block, here in changes.items() if not here)
                affinity.told(index, came, went, anew=False)
        load = {index: len(node.running) for index, node in enumerate(nodes)}
        pending = {index: sum(missing for _, missing in node.prompts) for index, node in enumerate(nodes)}
        route = affinity.pick(keys.prompt(asked), load, None, pending)
        return Choice(route.node, route.missing, route.source if fetching else None)

    return pick


def all_knowing(rate: float, *, fetching: bool) -> Router:
    """Knows each cache, and when each node has time."""

    def pick(turn: int, asked: Asked, nodes: Sequence[Node]) -> Choice:
        here = [node.cache.run(asked.blocks) for node in nodes]
        source = max(range(len(nodes)), key=lambda index: here[index])

        def cost(index: int) -> tuple[float, int]:
            there = here[source] - here[index] if fetching else 0
            missing = asked.tokens - BLOCK * (here[index] + there) + FETCHED * BLOCK * there
            return max(0.0, nodes[index].free - asked.at) + missing / rate, len(nodes[index].running)

        return Choice(min(range(len(nodes)), key=cost), 0, source if fetching else None)

    return pick


def play(trace: Sequence[Asked], router: Router, count: int, blocks: int, rate: float) -> Outcome:
    """`blocks` of each node's cache; `rate` in tokens of a prompt per second."""
    nodes = [Node(Cache(blocks)) for _ in range(count)]
    first, hits, busy = [], 0, 0.0
    for turn, asked in enumerate(trace):
        for node in nodes:
            node.pass_to(asked.at)
        choice = router(turn, asked, nodes)
        node = nodes[choice.node]
        most = (asked.tokens - 1) // BLOCK
        here = min(most, node.cache.run(asked.blocks))
        there = 0
        if choice.source is not None:
            there = max(0, min(most, nodes[choice.source].cache.run(asked.blocks)) - here)
        seconds = (asked.tokens - BLOCK * (here + there) + FETCHED * BLOCK * there) / rate
        node.cache.use(asked.blocks)
        node.free = max(asked.at, node.free) + seconds
        node.prompts.append((node.free, choice.missing))
        heapq.heappush(node.running, node.free + asked.output * TPOT)
        first.append(node.free - asked.at)
        hits += here + there
        busy += seconds
    return Outcome(tuple(first), hits, busy / count / trace[-1].at)


def rate_of(trace: Sequence[Asked], count: int, blocks: int) -> float:
    """At which round robin keeps the nodes busy for `BUSY` of the time."""
    once = play(trace, round_robin(), count, blocks, 1.0)
    return once.busy / BUSY


def oracle(trace: Sequence[Asked], blocks: int) -> int:
    """Hits of one cache."""
    cache, hits = Cache(blocks), 0
    for asked in trace:
        hits += min((asked.tokens - 1) // BLOCK, cache.run(asked.blocks))
        cache.use(asked.blocks)
    return hits


def compare(trace: Sequence[Asked], count: int, blocks: int) -> Iterator[tuple[str, Outcome]]:
    rate = rate_of(trace, count, blocks)
    yield "round robin", play(trace, round_robin(), count, blocks, rate)
    for name, told in (("gateway, untold", False), ("gateway", True)):
        yield name, play(trace, gateway(fetching=False, told=told), count, blocks, rate)
        yield f"{name}, fetching", play(trace, gateway(fetching=True, told=told), count, blocks, rate)
    yield "all-knowing", play(trace, all_knowing(rate, fetching=False), count, blocks, rate)
    yield "all-knowing, fetching", play(trace, all_knowing(rate, fetching=True), count, blocks, rate)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_routing", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=5000, help="of 512 tokens, in each node's cache")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    trace = read(options.trace)
    known = oracle(trace, options.nodes * options.blocks)
    rows = []
    for name, found in compare(trace, options.nodes, options.blocks):
        late = sorted(found.first)[int(0.99 * len(found.first))]
        print(
            f"{name:22} first token p50 {found.p50:6.2f} s  p99 {late:6.2f} s   hits {found.hits / known:4.0%} of one "
            f"cache's   busy {found.busy:4.0%}"
        )
        row = {"what": "trace", "router": name, "nodes": options.nodes, "blocks": options.blocks}
        rows.append(
            {**row, "p50_s": found.p50, "p99_s": late, "hits": found.hits / known, "busy": found.busy}
        )
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps({**row, **origin()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
