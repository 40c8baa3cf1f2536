"""More requests than can be served in time: the gateway's own admission over scripted nodes, on a clock of its own.

    python -m bench.overload                 every row; --json: one object a line; --save: keep the rows

Prefill nodes compute prompts one after the other at a fixed rate; decode nodes have so many places, and a token takes
longer the more are taken. Requests come at random (seeded) at 0.5 to 4 times what the nodes can serve, and ask for a
first token and tokens in time. The gateway is the real one (`control/homes.py`); only its streams are scripted. Goodput
is requests per second that met both targets, of those that came in the counted time; `worst` is the least of it in any
5 s, beside the mean: pools that swing against each other show there.
"""

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from afserve.clock import FakeClock
from afserve.control.admission import Objectives
from afserve.control.homes import HomeRules, Homes
from afserve.control.requests import Request, Requests
from afserve.control.wire.request_values import (
    Cancel,
    Submit,
    ToAttention,
    Tokens,
)
from afserve.control.wire.values import (
    AttentionNodes,
    AttentionPeer,
)
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenEvent
from afserve.errors import OverloadedError
from afserve.member import AttentionPhase, Life, attention_life
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "overload.jsonl"
TURN = 0.005  # seconds
BIN = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """`load` of what the nodes can serve; prompts have `prompt` tokens, answers `answer` on average. `rate`: tokens per
    second of a prefill node; `places` of a decode node, where a token takes `step` seconds and `each` more per place
    taken."""

    load: float
    admits: bool
    prefill: int = 2
    decode: int = 2
    prompt: int = 2000
    answer: int = 100
    rate: float = 20_000.0
    places: int = 32
    step: float = 0.010
    each: float = 0.0004
    ttft: float = 1.0
    tpot: float = 0.03
    warm: float = 10.0
    period: float = 40.0

    @property
    def capacity(self) -> float:
        """Requests per second that prefill or decode nodes can serve, whichever is less."""
        full = self.step + self.each * self.places
        reads = self.prefill * self.rate / self.prompt
        return min(reads, self.decode * self.places / (full * self.answer))


@dataclass
class Node:
    """A stream to the gateway, and what the node behind it does: the decode node has its prompts computed in order."""

    life: Life
    number: int = 1
    inbox: list[ToAttention] = field(default_factory=list)
    waiting: deque[GenerationRequest] = field(default_factory=deque)  # its prompt is there, it has no place
    running: dict[int, int] = field(default_factory=dict)  # tokens that are left
    due: float = 0.0

    def send(self, value: ToAttention) -> None:
        self.inbox.append(value)


@dataclass
class Prefill:
    free: float = 0.0  # when every prompt is computed that it was given
    done: deque[tuple[float, Node, GenerationRequest]] = field(default_factory=deque)


@dataclass
class Outcome:
    came: float
    answer: int
    request: Request | None
    first: float = float("inf")
    ended: float = float("inf")

    def met(self, case: Case) -> bool:
        per_token = (self.ended - self.first) / max(1, self.answer - 1)
        return self.first - self.came <= case.ttft and per_token <= case.tpot


class World:
    def __init__(self, case: Case) -> None:
        self.case, self.clock = case, FakeClock()
        self.homes = Homes(Requests(), HomeRules(), self.clock)
        prefill, decode = range(case.prefill), range(case.prefill, case.prefill + case.decode)
        self.reads = {index: Prefill() for index in prefill}
        self.nodes = [Node(attention_life(index, 0)) for index in decode]
        peers = [
            AttentionPeer(attention_life(index, 0), True, f"node-{index}", AttentionPhase.PREFILL)
            for index in prefill
        ]
        peers += [
            AttentionPeer(attention_life(index, 0), True, f"node-{index}", AttentionPhase.DECODE)
            for index in decode
        ]
        self.homes.update_nodes(AttentionNodes(tuple(peers)))
        for index in prefill:
            self.homes.entered(Node(attention_life(index, 0)), ())
        for node in self.nodes:
            self.homes.entered(node, ())
        self.outcomes: list[Outcome] = []
        self.slowest_check = 0.0
        self._by_number: dict[int, Outcome] = {}

    def ask(self, dice: random.Random) -> None:
        now, answer = self.clock.now(), dice.randrange(2, 2 * self.case.answer - 1)
        prompt = tuple(dice.randrange(1 << 20) for _ in range(self.case.prompt))
        if self.case.admits:
            began = time.thread_time()
            try:
                self.homes.admit([prompt], Objectives(self.case.ttft, self.case.tpot))
            except OverloadedError:
                self.outcomes.append(Outcome(now, answer, None))
                return
            finally:
                self.slowest_check = max(self.slowest_check, time.thread_time() - began)
        params = SamplingParams(max_tokens=answer, temperature=0.0)
        request = self.homes.open(GenerationRequest(0, prompt, params))
        self.outcomes.append(Outcome(now, answer, request))
        self._by_number[request.number] = self.outcomes[-1]

    def turn(self) -> None:
        now = self.clock.now()
        for node in self.nodes:
            for value in node.inbox:
                if isinstance(value, Submit):
                    self._submitted(node, value, now)
                elif isinstance(value, Cancel):
                    raise AssertionError("nobody cancels here")
            node.inbox.clear()
        for prefill in self.reads.values():
            while prefill.done and prefill.done[0][0] <= now:
                _, node, request = prefill.done.popleft()
                node.waiting.append(request)
        for node in self.nodes:
            self._decode(node, now)
        self.homes.check_time()

    def _submitted(self, node: Node, submit: Submit, now: float) -> None:
        assert submit.kv_from is not None, "a prefill node is there"
        prefill = self.reads[submit.kv_from.life.index]
        prefill.free = max(now, prefill.free) + len(submit.request.prompt_ids) / self.case.rate
        prefill.done.append((prefill.free, node, submit.request))

    def _decode(self, node: Node, now: float) -> None:
        if now < node.due:
            return
        if node.running:
            events = []
            for number in list(node.running):
                node.running[number] -= 1
                over = not node.running[number]
                events.append(TokenEvent(number, (1,), "length" if over else None))
                outcome = self._by_number[number]
                outcome.first = min(outcome.first, now)
                if over:
                    outcome.ended = now
                    del node.running[number]
            self.homes.heard(node, Tokens(tuple(events)))
            for event in events:
                ended = self._by_number[event.handle].request
                if event.finish_reason is not None and ended is not None:
                    self.homes.close(ended)
        while node.waiting and len(node.running) < self.case.places:
            request = node.waiting.popleft()
            node.running[request.handle] = request.params.max_tokens
        taken = len(node.running)
        late = (
            now - node.due if node.due and now - node.due <= TURN else 0.0
        )  # a step does not begin with a turn
        node.due = now - late + self.case.step + self.case.each * taken if taken else 0.0


def run(case: Case) -> dict[str, Any]:
    world, dice = World(case), random.Random(7)
    until = case.warm + case.period
    coming = dice.expovariate(case.load * case.capacity)
    start = world.clock.now()
    while (now := world.clock.now() - start) < until + 2 * (case.ttft + case.answer * case.tpot):
        while coming <= now and coming < until:
            world.ask(dice)
            coming += dice.expovariate(case.load * case.capacity)
        world.turn()
        world.clock.advance(TURN)
    counted = [one for one in world.outcomes if one.came - start >= case.warm]
    met = [one for one in counted if one.met(case)]
    bins = [0] * round(case.period / BIN)
    for one in met:
        bins[min(len(bins) - 1, int((one.came - start - case.warm) / BIN))] += 1
    taken = [one for one in counted if one.request is not None]
    return {
        "offered": case.load,
        "admission": case.admits,
        "capacity_s": round(case.capacity, 2),
        "goodput_s": round(len(met) / case.period, 2),
        "worst_s": round(min(bins) / BIN, 2),
        "of_capacity": round(len(met) / case.period / case.capacity, 3),
        "refused": round(1 - len(taken) / len(counted), 3),
        "taken_that_met": round(len(met) / max(1, len(taken)), 3),
        "slowest_check_cpu_ms": round(1e3 * world.slowest_check, 3),
    }


def cases() -> Iterator[Case]:
    for places in (32, 16):  # prefill is the narrow pool, then decode
        for load in (0.5, 0.9, 1.5, 2.0, 4.0):
            for admits in (False, True):
                yield Case(load, admits, places=places)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--quick", action="store_true", help="a quarter of the time")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    known = origin()
    for case in cases():
        row = {"places": case.places, **run(replace(case, period=10.0) if options.quick else case)}
        print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        if options.save:
            with Path(options.save).open("a") as file:
                file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
