"""An hour of agents in virtual time, over the product's own cache, tiers, names and routing; no model is computed.

    python -m bench.agent_hour [--save]

50 sessions of Mooncake's published shape (`afserve bench agent`): a system prompt and tools that all share, turn by
turn a tool's result and an answer, half of which is reasoning that the next prompt leaves out. Between two turns a tool
takes some seconds, now and then a user takes a minute. Every third turn a side request reads something long that nobody
asks again. After 20 minutes a node is restarted, after 40 everything. `hints` are what clients say: `cache_control` of
five minutes on conversations and none on side requests, `behind` that side requests have a lower priority
(`nvext.agent_hints`), `ahead` is --warm-ahead. A prompt is found as far as it need not
be computed. Times come from `Machine` alone: a node computes prompts by the product's turns, a step of one after the
other, and answers beside them cost nothing. All ask with one key.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from afserve.cli.load.sessions import SessionShape
from afserve.clock import FakeClock
from afserve.control.affinity import Affinity, Chain, OpenPrompts
from afserve.control.node.prefixes import SECONDS
from afserve.engine.scheduling.request import AHEAD_PRIORITY, GenerationRequest, SamplingParams, Tenant
from bench.agent_hour_node import BLOCK, HourNode, Job, Machine, Tiered, whole_steps
from bench.agent_hour_oracle import Everything, OracleNode
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "agent_hour.jsonl"
RETAIN = 300.0  # seconds, as Claude Code marks its prompts
SIDE = 6_000  # tokens of a side request
SIDE_SHARE = 1 / 3
USER_SHARE, USER_SECONDS, TOOL_SECONDS = 0.2, 60.0, 8.0
SWITCHED_OFF = 30.0  # seconds of a restart
_VOCABULARY = 1 << 17
STEP = 512  # tokens of a prompt at once, as an attention node's default is
SAID = ("hints", "behind", "ahead")
_KEY = Tenant("agents")
_PARAMS = SamplingParams(max_tokens=1 << 16, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Scene:
    """`cache` is what of all live tokens the nodes' caches hold together, `host` the same of host memory. An
    `oracle` has nodes that know the future, or, where it is `lossless`, lose nothing."""

    name: str
    cache: float
    host: float = 0.0
    disk: bool = True
    hints: bool = True
    behind: bool = False
    ahead: bool = True
    sessions: int = 50
    oracle: bool = False
    lossless: bool = False
    nodes: int = 2
    seconds: float = 3600.0
    turns: int = 30
    seed: int = 1
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, slots=True)
class Note:
    """A request that was answered: its blocks, by number, from `began` to `ended`; the first `asked` are of its prompt.
    `gap`: seconds until its conversation goes on, None of one that does not; `by_user`: a user says how."""

    began: float
    ended: float
    node: int
    names: tuple[int, ...]
    asked: int
    gap: float | None
    by_user: bool


@dataclass
class Outcome:
    """Of turns of conversations: tokens asked and found, and seconds to first tokens; those of side requests apart."""

    asked: int = 0
    found: int = 0
    first: list[float] = field(default_factory=list)
    side: list[float] = field(default_factory=list)
    ahead_tokens: int = 0

    @property
    def share(self) -> float:
        return self.found / max(1, self.asked)

    def late(self, share: float) -> float:
        return _late(self.first, share)

    def side_late(self, share: float) -> float:
        return _late(self.side, share)


def _late(seconds: list[float], share: float) -> float:
    return sorted(seconds)[int(share * (len(seconds) - 1))] if seconds else 0.0


def _drawn(draw: random.Random, count: int) -> tuple[int, ...]:
    """Token ids."""
    return tuple(one % _VOCABULARY for one in array("I", draw.randbytes(4 * count)))


class Conversation:
    """One agent's: its prompt so far, and what is said next."""

    def __init__(self, number: int, scene: Scene, shared: tuple[int, ...]) -> None:
        self._draw, self._shape = random.Random(f"{scene.seed}-{number}"), SessionShape(turns=scene.turns)
        self._shared, self._turns = shared, scene.turns
        self.number = number
        self._begin()

    def _begin(self) -> None:
        self.turn, self.prompt, self.by_user = 0, self._shared + self._words(self._shape.user), True

    def _words(self, mean: int) -> tuple[int, ...]:
        count = max(1, round(self._draw.uniform(0.5, 1.5) * mean))
        return _drawn(self._draw, count)

    def answer(self) -> tuple[int, ...]:
        return self._words(self._shape.output)

    def certain(self, output: tuple[int, ...]) -> tuple[int, ...]:
        """Of the next prompt, once there is the answer: its reasoning, the first half, is left out."""
        return self.prompt + output[len(output) // 2 :]

    def go_on(self, output: tuple[int, ...]) -> float:
        """The next turn's prompt; in how many seconds it is asked."""
        self.turn += 1
        if self.turn == self._turns:
            self._begin()
            return self._draw.expovariate(1 / USER_SECONDS)
        self.prompt = self.certain(output) + self._words(self._shape.tool)
        self.by_user = self._draw.random() < USER_SHARE
        return self._draw.expovariate(1 / (USER_SECONDS if self.by_user else TOOL_SECONDS))

    def side(self) -> tuple[int, ...] | None:
        return self._words(SIDE) if self._draw.random() < SIDE_SHARE else None


def live_tokens(scene: Scene) -> int:
    """Of all conversations in the middle of their turns, what all share once."""
    shape = SessionShape()
    return shape.system + scene.sessions * (shape.user + scene.turns // 2 * (shape.tool + shape.output // 2))


class Hour:
    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self._folder = scene, folder
        self.clock, self.outcome, self.notes = FakeClock(), Outcome(), list[Note]()
        blocks = int(scene.cache * live_tokens(scene) / BLOCK)
        self._all = Everything(None if scene.lossless else blocks)  # for an oracle
        self._numbers: dict[bytes, int] = {}  # of blocks
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._handles = itertools.count(), itertools.count(1)
        draw = random.Random(scene.seed)
        shared = _drawn(draw, SessionShape().system)
        self.sessions = [Conversation(number, scene, shared) for number in range(scene.sessions)]
        self.nodes: dict[int, HourNode] = {}
        self._where: dict[int, tuple[Job, int]] = {}  # open requests by handle: the node
        self._waiting: list[Job] = []
        self._affinity = Affinity(BLOCK)
        for index in range(scene.nodes):
            self._start(index)

    # ---- time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.clock.now()), next(self._order), what))

    def run(self) -> Outcome:
        scene, draw = self.scene, random.Random(self.scene.seed + 1)
        for one in self.sessions:
            self.at(draw.uniform(0.0, 30.0), partial(self._turn, one))
        self.at(SECONDS, self._tell)
        self.at(scene.seconds / 3, lambda: self._restart([0]))
        self.at(scene.seconds * 2 / 3, lambda: self._restart(list(range(scene.nodes))))
        while self._events and self._events[0][0] <= scene.seconds:
            when, _, what = heapq.heappop(self._events)
            self.clock.advance(max(0.0, when - self.clock.now()))
            what()
        self.outcome.ahead_tokens = sum(node.ahead_tokens for node in self.nodes.values())
        for node in self.nodes.values():
            node.close()
        return self.outcome

    # ---- nodes

    def _start(self, index: int) -> None:
        scene, live = self.scene, live_tokens(self.scene) // BLOCK
        below = Tiered(
            int(scene.host * live / scene.nodes), self._folder / str(index) if scene.disk else None
        )
        blocks = int(scene.cache * live / scene.nodes)
        self.nodes[index] = (
            OracleNode(blocks, scene.machine, self.clock, self._all)
            if scene.oracle
            else HourNode(blocks, below, scene.machine, self.clock)
        )
        self._affinity.told(index, self.nodes[index].told.prefixes.all(), (), anew=True)
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._place(job)

    def _restart(self, indices: list[int]) -> None:
        """Requests go on elsewhere, or wait until there is a node again."""
        lost = [job for job, where in self._where.values() if where in indices]
        for index in indices:
            self.outcome.ahead_tokens += self.nodes[index].ahead_tokens
            self.nodes.pop(index).close()
            self._affinity.told(index, (), (), anew=True)
            self.at(self.clock.now() + SWITCHED_OFF, partial(self._start, index))
        for job in lost:
            job.sequence = None
            self._place(job)

    def _tell(self) -> None:
        for index, node in self.nodes.items():
            node.told.look()
            came, went = node.told.prefixes.take()
            self._affinity.told(index, came, went, anew=False)
            self._move_line(node)
        self.at(self.clock.now() + SECONDS, self._tell)

    # ---- requests

    def _turn(self, one: Conversation) -> None:
        retain = RETAIN if self.scene.hints else 0.0
        self._place(self._job(one.prompt, one.answer(), one.number, retain))
        if (side := one.side()) is not None:
            self._place(self._job(side, one.answer(), -1, 0.0, int(self.scene.behind)))

    def _job(
        self, prompt: tuple[int, ...], output: tuple[int, ...], session: int, retain: float, priority: int = 0
    ) -> Job:
        number = next(self._handles)
        asked = GenerationRequest(number, prompt, _PARAMS, priority=priority, retain=retain, tenant=_KEY)
        return Job(asked, self.clock.now(), output, session)

    def _place(self, job: Job) -> None:
        if not self.nodes:
            self._waiting.append(job)
            return
        counts = dict.fromkeys(self.nodes, 0)
        tokens = dict(counts)
        prompts = {index: OpenPrompts() for index in self.nodes}
        for other, where in self._where.values():
            if where in counts and other.request.handle != job.request.handle:
                counts[where] += 1
                prompts[where].add(other.chain, len(other.request.prompt_ids))
                tokens[where] += 0 if other.first else len(other.request.prompt_ids) - other.found

        def room(index: int, chain: Chain) -> int:
            there = prompts[index]
            return self.nodes[index].cache_tokens - there.tokens + there.shared(chain)

        route = self._affinity.pick(job.request.prompt_ids, counts, None, tokens, room=room)
        node, job.chain = self.nodes[route.node], route.chain
        self._where[job.request.handle] = job, route.node
        node.reading += 1
        self._give_way(node)
        source = self.nodes.get(route.source) if route.source is not None else None
        came = node.pull_beginning(job, source) if source is not None else self.clock.now()
        self.at(came, lambda: self._restore(job, node))

    def _restore(self, job: Job, node: HourNode) -> None:
        if not self._mine(job, node):
            return
        if node.read(job):
            self._move_line(node)
        else:
            self._queue(job, node)

    def _move_line(self, node: HourNode) -> None:
        """There may be room for those that wait for their beginnings."""
        for handle, when in node.take_read().items():
            job, _ = self._where[handle]
            self.at(when, partial(self._queue, job, node))

    def _mine(self, job: Job, node: HourNode) -> bool:
        """Whether this node, in this life of it, still has it."""
        found = self._where.get(job.request.handle)
        return found is not None and self.nodes.get(found[1]) is node

    def _queue(self, job: Job, node: HourNode) -> None:
        if self._mine(job, node):
            node.reading -= 1
            node.enqueue(job)
            self._next(node)

    def _next(self, node: HourNode) -> None:
        """A step of the prompt whose turn it is."""
        if node.running is not None:
            return
        if node.admit():
            self._move_line(node)
        if (job := node.whose_turn()) is None:
            return
        node.running, tokens = job, min(STEP, job.left)
        self.at(
            self.clock.now() + tokens / self.scene.machine.prefill,
            lambda: self._stepped(job, node, tokens),
        )

    def _stepped(self, job: Job, node: HourNode, tokens: int) -> None:
        if not self._mine(job, node):
            return
        node.running = None
        node.compute(job, tokens)
        if not job.left:
            self._first(job, node)
        self._next(node)

    def _first(self, job: Job, node: HourNode) -> None:
        node.active.remove(job)
        if not job.first:
            job.first = self.clock.now()
            if job.session >= 0:
                self.outcome.first.append(job.first - job.arrived)
                self.outcome.asked += len(job.request.prompt_ids)
                self.outcome.found += job.found
            else:
                self.outcome.side.append(job.first - job.arrived)
        node.decoding.append(job)
        seconds = len(job.output) * self.scene.machine.tpot
        self.at(self.clock.now() + seconds, lambda: self._end(job, node))

    def _end(self, job: Job, node: HourNode) -> None:
        if not self._mine(job, node):
            return
        assert job.sequence is not None
        job.sequence.tokens += job.output
        node.compute(job, len(job.output) - 1)
        node.decoding.remove(job)
        names, gap, now = job.sequence.full_hashes(BLOCK), None, self.clock.now()
        node.end(job)
        _, index = self._where.pop(job.request.handle)
        self._move_line(node)
        if job.session >= 0:
            one = self.sessions[job.session]
            certain, gap = one.certain(job.output), one.go_on(job.output)
            self.at(now + gap, lambda: self._turn(one))
            if self.scene.ahead and one.turn:
                self._ahead(certain, job, node)
        numbers = tuple(self._numbers.setdefault(name, len(self._numbers)) for name in names)
        asked, by_user = (len(job.request.prompt_ids) - 1) // BLOCK, gap is not None and one.by_user
        node.comes_again(names[:asked], float("inf") if gap is None else now + gap)
        self.notes.append(Note(job.began, now, index, numbers, asked, gap, by_user))
        self._next(node)
        self._begin_ahead(node)

    # ---- what nobody waits for

    def _ahead(self, certain: tuple[int, ...], job: Job, node: HourNode) -> None:
        asked = GenerationRequest(
            next(self._handles),
            certain,
            SamplingParams(max_tokens=1, temperature=0.0),
            priority=AHEAD_PRIORITY,
            tenant=job.request.tenant,
            retain=job.request.retain,
        )
        node.ahead.append(Job(asked, self.clock.now(), (), job.session))

    def _begin_ahead(self, node: HourNode) -> None:
        if not node.ahead or node.running is not None or not node.idle:
            return
        job = node.ahead.popleft()
        if not node.begin(job):
            return
        node.running = job
        missing = len(job.request.prompt_ids) - job.found
        job.first = self.clock.now()  # when it began
        self.at(
            self.clock.now() + missing / self.scene.machine.prefill,
            lambda: self._ahead_over(job, node, missing),
        )

    def _ahead_over(self, job: Job, node: HourNode, tokens: int) -> None:
        if node.running is not job or node not in self.nodes.values():
            return
        node.running = None
        node.compute(job, tokens)
        node.ahead_tokens += tokens
        node.end(job)
        self._next(node)
        self._begin_ahead(node)

    def _give_way(self, node: HourNode) -> None:
        """Somebody came: what is under way ends at once, and its last step is lost."""
        job = node.running
        if job is None or not job.request.ahead:
            return
        missing = len(job.request.prompt_ids) - job.found
        done = min(missing, whole_steps((self.clock.now() - job.first) * self.scene.machine.prefill))
        self._ahead_over(job, node, done)
        if done < missing:
            node.ahead.appendleft(job)


def play(scene: Scene) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return Hour(scene, Path(folder)).run()


def scenes() -> list[Scene]:
    found = []
    for hints, behind, ahead in ((True, True, True), (True, False, True), (False, False, False)):
        plain = Scene("the cache holds what is live, disk", 1.5, hints=hints, behind=behind, ahead=ahead)
        small = replace(plain, name="a third of what is live, disk", cache=1 / 3)
        both = replace(small, name="a third of what is live, host memory and disk", host=1.0)
        found += [
            plain,
            small,
            both,
            replace(small, name="a third of what is live, nothing below", disk=False),
        ]
    small = Scene(
        "a third of what is live, nothing is ever lost", 1 / 3, hints=False, ahead=False, oracle=True
    )
    small = replace(small, lossless=True)
    future = replace(small, name="a third of what is live, disk, the future known", lossless=False)
    return [*found, small, replace(small, behind=True), future, replace(future, behind=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.agent_hour", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of virtual time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of scenes, from 0 on; else all 16")
    options = parser.parse_args()
    rows = []
    for scene in scenes() if options.only is None else map(scenes().__getitem__, options.only):
        found = play(replace(scene, seconds=options.seconds))
        row = {
            "what": "hour",
            "scene": scene.name,
            "hints": scene.hints,
            "behind": scene.behind,
            "ahead": scene.ahead,
            "sessions": scene.sessions,
            "nodes": scene.nodes,
            "seconds": options.seconds,
            "turns": len(found.first),
            "found": round(found.share, 4),
            "p50_s": round(statistics.median(found.first), 4),
            "p90_s": round(found.late(0.9), 4),
            "p99_s": round(found.late(0.99), 4),
            "side_p90_s": round(found.side_late(0.9), 4),
            "ahead_tokens": found.ahead_tokens,
        }
        rows.append(row)
        said = ", ".join(name for name in SAID if row[name]) or "none"
        print(
            f"{scene.name:46} {said:12} {row['turns']:6,} turns  {found.share:6.1%} of prompt tokens found  "
            f"first token p50 {row['p50_s']:.2f} s  p90 {row['p90_s']:.2f} s  p99 {row['p99_s']:.2f} s  "
            f"side requests p90 {row['side_p90_s']:.2f} s",
            flush=True,
        )
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps({**row, **origin()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
