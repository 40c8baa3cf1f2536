"""A long run under seeded faults: real arrival times, cancelled and preempted requests, and what has grown at the end.

Every request is to be answered exactly once, and every greedy one with the tokens of an undisturbed run. The processes
are looked at twice, both times whole and idle: after the first faults and at the end.
"""

import asyncio
import csv
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import httpx

from afserve.drafts import DEFAULT_DRAFT
from bench.busy import busy_loops
from bench.faults_deployment import CONTROLLER, Deployment
from bench.faults_growth import Held, held
from bench.faults_load import PROMPTS, Answer, hear
from bench.faults_mixed import ask_mixed
from bench.faults_nodes import NODES, PROVEN_S, Row
from bench.served import served

# A cache that a few long requests fill, so that some are preempted.
FLAGS = ("--expert-copies", "2", "--gateways", "1", "--kv-tokens", "1024", "--loss-deadline", "60")
LONGEST, LEAST = 160, 8  # tokens of an answer
CANCELLED, SAMPLED = 0.1, 0.2  # shares of the requests
EVERY_S = 4.0  # between two faults, on average
WARM_S = 15.0  # until the processes are looked at for the first time
REST_S = 3.0
KINDS = ("kill", "stop", "slow")
STOPPED_S = (0.2, 3.0)


@dataclass(frozen=True, slots=True)
class Soak:
    """`rate` is the mean number of requests per second; `arrivals` a trace whose gaps are scaled to it. `mixed`:
    requests of every kind run beside the streams. `busy`: so many endless loops do, too. `draft` as of `--draft`."""

    seconds: float
    arrivals: Path | None = None
    rate: float = 4.0
    seed: int = 1
    every: float = EVERY_S
    warm: float = WARM_S
    mixed: bool = False
    busy: int = 0
    draft: str = DEFAULT_DRAFT


@dataclass(slots=True)
class Asked:
    """One request. `cut` is after how many pieces its client goes; 0 where it stays."""

    answer: Answer
    tokens: int
    greedy: bool
    cut: int = 0


@dataclass(slots=True)
class Told:
    """Of a whole run."""

    asked: list[Asked] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)


def arrivals(path: Path) -> list[tuple[float, int]]:
    """(seconds since the first, tokens of the answer): of CSV with TIMESTAMP and GeneratedTokens, or of JSON lines."""
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".csv":
            found = [
                (datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
        else:
            lines = map(json.loads, file)
            found = [(line["timestamp"] / 1e3, line["output_length"]) for line in lines]
    found.sort()
    return [(at - found[0][0], tokens) for at, tokens in found]


def schedule(soak: Soak, draw: random.Random) -> Iterator[tuple[float, int]]:
    """The same from a moment on that is drawn, gaps scaled to the rate, for ever; without a trace all is drawn."""
    if soak.arrivals is None:
        at = 0.0
        while True:
            at += draw.expovariate(soak.rate)
            yield at, draw.randint(LEAST, LONGEST)
    found = arrivals(soak.arrivals)
    last, start = found[-1][0], draw.randrange(len(found))
    scale, first = len(found) / last / soak.rate, found[start][0]
    yield from (((at - first) * scale, tokens) for at, tokens in found[start:])
    for turn in itertools.count(1):
        yield from (((turn * last + at - first) * scale, tokens) for at, tokens in found)


async def play(soak: Soak, here: Deployment) -> Row:
    """Raises RuntimeError where the deployment does not become whole again."""
    reference = await _reference(here.url)
    told = Told()
    await _spell(here, told, replace(soak, seconds=soak.warm, seed=soak.seed + 1))
    before = await asyncio.to_thread(held, here)
    with busy_loops(soak.busy):
        await _spell(here, told, soak)
    after = await asyncio.to_thread(held, here)
    status = await asyncio.to_thread(here.status)
    return {
        "bench": "faults_soak",
        "seconds": soak.seconds,
        "rate": soak.rate,
        "arrivals": soak.arrivals.name if soak.arrivals else "poisson",
        "seed": soak.seed,
        "faults": dict(sorted(told.faults.items())),
        "busy": soak.busy,
        "draft": soak.draft,
        **counted(told.asked, reference),
        "mixed": dict(sorted(told.mixed.items())),
        "mixed_wrong": dict(told.wrong.most_common(8)),
        "lost": status["lost"],
        "preemptions": after.preemptions,
        "accepted_drafts": after.accepted,
        **_grown(before, after),
    }


def counted(asked: list[Asked], reference: Mapping[str, str]) -> Row:
    """How requests ended. `twice` were told so more than once."""
    stayed = [one for one in asked if not one.cut]
    answered = [one.answer for one in stayed if not one.answer.error]
    greedy = [one for one in asked if one.greedy and not one.answer.error]
    errors = Counter(one.answer.error for one in stayed if one.answer.error)
    return {
        "requests": len(asked),
        "answered": len(answered),
        "cancelled": sum(bool(one.cut) for one in asked),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(5)),
        "twice": sum(answer.ends > 1 for answer in answered),
        "short": sum(len(one.answer.times) < 1 for one in stayed if not one.answer.error),
        "compared": len(greedy),
        "altered": sum(not _alike(one, reference[one.answer.prompt]) for one in greedy),
    }


def _alike(one: Asked, whole: str) -> bool:
    """A shorter answer is the beginning of the longest one; a character may be cut at its end."""
    return whole.startswith(one.answer.text.rstrip("\ufffd"))


def _grown(before: Held, after: Held) -> Row:
    """What the processes hold at the end, with what they held at the beginning."""
    return {
        "memory_mib": [round(held.memory / 2**20) for held in (before, after)],
        "descriptors": [before.descriptors, after.descriptors],
        "threads": [before.threads, after.threads],
        "processes": [before.processes, after.processes],
        "shared_segments": [before.segments, after.segments],
        "kv_in_use": [before.kv_in_use, after.kv_in_use],
        "requests_open": [before.requests, after.requests],
    }


async def _reference(url: str) -> dict[str, str]:
    """The longest answer to each prompt, before any fault."""
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:
        for prompt in PROMPTS:
            one = Asked(Answer(prompt, time.monotonic()), LONGEST, greedy=True)
            await _ask(client, one)
            if one.answer.error:
                raise RuntimeError(f"{prompt!r} was not answered before any fault: {one.answer.error}")
            found[prompt] = one.answer.text
    return found


async def _spell(here: Deployment, told: Told, soak: Soak) -> None:
    """Requests and faults for so long; then all are answered, and everyone serves."""
    draw = random.Random(soak.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=here.url, timeout=300, limits=limits) as client:
        breaking = asyncio.create_task(_break(here, soak, told.faults))
        others = asyncio.create_task(
            ask_mixed(client, soak.seconds if soak.mixed else 0.0, soak.seed, told.mixed, told.wrong)
        )
        asking = []
        began = time.monotonic()
        for at, tokens in schedule(soak, draw):
            if at > soak.seconds:
                break
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            told.asked.append(_drawn(draw, tokens))
            asking.append(asyncio.create_task(_ask(client, told.asked[-1])))
        await breaking
        await others
        await asyncio.gather(*asking)
    await here.wait_whole()
    await asyncio.sleep(REST_S)


def _drawn(draw: random.Random, tokens: int) -> Asked:
    tokens = min(max(tokens, LEAST), LONGEST)
    cut = draw.randint(1, LEAST) if draw.random() < CANCELLED else 0
    return Asked(Answer(draw.choice(PROMPTS), time.monotonic()), tokens, draw.random() >= SAMPLED, cut)


async def _ask(client: httpx.AsyncClient, one: Asked) -> None:
    body = {
        "prompt": one.answer.prompt,
        "max_tokens": one.tokens,
        "temperature": 0 if one.greedy else 1,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if not reply.is_success:
                await reply.aread()
                one.answer.error = reply.text
                return
            async for line in reply.aiter_lines():
                hear(one.answer, line)
                if one.cut and len(one.answer.times) >= one.cut:
                    one.answer.error = ""
                    return
    except httpx.HTTPError as error:
        one.answer.error = f"{type(error).__name__}: {error}"


async def _break(here: Deployment, soak: Soak, faults: Counter[str]) -> None:
    """One node after another, each whenever its turn comes, whole or not; now and then the controller."""
    draw = random.Random(soak.seed)
    until, controlled = time.monotonic() + soak.seconds, time.monotonic()
    while (pause := draw.uniform(0.5, 1.5) * soak.every) + time.monotonic() < until:
        await asyncio.sleep(pause)
        if time.monotonic() - controlled > 2 * PROVEN_S:
            controlled = time.monotonic()
            await here.wait_whole()
            await asyncio.to_thread(here.break_one, CONTROLLER, None)
            faults["controller killed"] += 1
            await here.wait_whole()
            continue
        nodes = await asyncio.to_thread(here.model_nodes)
        name, kind = draw.choice(sorted(nodes)), draw.choice(KINDS)
        if await asyncio.to_thread(here.fault, name, kind, draw.uniform(*STOPPED_S)):
            faults[f"{name.rpartition('-')[0]} {kind}"] += 1


def measure(soak: Soak) -> Row:
    with served(*NODES, *FLAGS, "--draft", soak.draft) as up, Deployment(up) as here:
        return asyncio.run(play(soak, here))


def line_of(found: Row) -> str:
    return "\n".join(f"{key:<16} {value}" for key, value in found.items() if key != "bench")
