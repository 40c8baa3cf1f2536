"""A steady open-loop load of greedy streams, and what its clients saw around a moment: gaps, failures, other tokens.

Requests begin at a fixed rate, whether or not earlier ones have been answered. It knows HTTP and no cluster.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from afserve import AsyncClient
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import AfserveError

PROMPTS = tuple(
    f"{head}\n"
    for head in (
        "import os",
        "def main():",
        "class Stack:",
        "for i in range(3):",
        "x = [",
        "try:",
        "with open(path) as f:",
        "def add(x, y):",
    )
)
RESUME_S = 30.0
_SLICE_S = 0.05
WINDOW_S = 2.0  # a gap belongs to a moment if it begins before this much later


@dataclass(slots=True)
class Answer:
    """One request. `times` are of its tokens, after `began`; `error` is empty where it ended as it should."""

    prompt: str
    began: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str = "not ended"
    ends: int = 0  # how often it was told that this is all

    def stall(self, at: float, window: float = WINDOW_S) -> float | None:
        """The longest wait for a token that reaches into the window from `at`; None where it did not run then."""
        moments = [self.began, *self.times]
        gaps = [b - a for a, b in itertools.pairwise(moments) if b > at and a < at + window]
        return max(gaps, default=None) if self.began < at + max(0.0, window - WINDOW_S) else None


class Load:
    """`async with` begins and ends it; on the way out everything that has begun is read to its end.

    `per_second`: requests that begin, from the next one on. `resumes`: by afserve's own client, which goes on with a
    request whose connection broke; else by plain HTTP. `salted`: no request finds another one's prompt in a cache.
    """

    def __init__(
        self,
        url: str,
        rate: float,
        tokens: int,
        prompts: Sequence[str] = PROMPTS,
        *,
        resumes: bool = False,
        salted: bool = False,
    ) -> None:
        self.answers: list[Answer] = []
        self.per_second, self._tokens, self._prompts = rate, tokens, prompts
        self._salts = itertools.count() if salted else None
        self._own = AsyncClient(url, resume=RESUME_S) if resumes else None
        self._client = httpx.AsyncClient(base_url=url, timeout=180, limits=httpx.Limits(max_connections=None))
        self._reading: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Load":
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._asking is not None
        self._asking.cancel()
        await asyncio.gather(*self._reading)
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()
        if self._own is not None:
            await self._own.close()

    async def reference(self) -> dict[str, str]:
        """What each prompt is answered while nothing happens."""
        found = {}
        for prompt in self._prompts:
            answer = Answer(prompt, time.monotonic())
            await self.read(answer)
            if answer.error:
                raise RuntimeError(f"{prompt!r} was not answered before any fault: {answer.error}")
            found[prompt] = answer.text
        return found

    def stalls(self, at: float, window: float = WINDOW_S) -> list[float]:
        """Of every stream that ran at that moment, or began so long before the window's end."""
        return [stall for answer in self.answers if (stall := answer.stall(at, window)) is not None]

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between tokens that came in that time."""
        pairs = (pair for answer in self.answers for pair in itertools.pairwise(answer.times))
        return [b - a for a, b in pairs if since <= b < until]

    def rate(self, since: float, until: float) -> float:
        """Tokens per second that all clients read."""
        return sum(since <= t < until for answer in self.answers for t in answer.times) / (until - since)

    async def _ask(self) -> None:
        last = time.monotonic() - (1 / self.per_second if self.per_second else 0.0)
        for prompt in itertools.cycle(self._prompts):
            last = await self._due(last)
            self._begin(prompt)

    async def _due(self, last: float) -> float:
        """Waits for the next one, by the rate of then; when it was due."""
        while True:
            now = time.monotonic()
            if not self.per_second:
                last, due = now, now + _SLICE_S
            elif (due := last + 1 / self.per_second) <= now:
                return due
            await asyncio.sleep(min(due - now, _SLICE_S))

    def _begin(self, prompt: str) -> "asyncio.Task[None]":
        answer = Answer(prompt, time.monotonic())
        self.answers.append(answer)
        task = asyncio.create_task(self.read(answer))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return task

    async def read(self, answer: Answer) -> None:
        """One request, until it has ended."""
        if self._own is not None:
            await self._read_by(self._own, answer)
            return
        body = {"prompt": answer.prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        salt = {} if self._salts is None else {"cache_salt": f"salt-{next(self._salts)}"}
        asked = {**body, **salt, "stream": True}
        try:
            async with self._client.stream("POST", "/v1/completions", json=asked) as reply:
                if not reply.is_success:
                    await reply.aread()
                    answer.error = reply.text
                    return
                async for line in reply.aiter_lines():
                    hear(answer, line)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__} after {len(answer.times)} tokens: {error}"

    async def _read_by(self, client: AsyncClient, answer: Answer) -> None:
        params = SamplingParams(max_tokens=self._tokens, temperature=0, ignore_eos=True)
        try:
            async for delta in client.complete_stream(answer.prompt, params):
                answer.text += delta.text
                answer.times.append(time.monotonic())
            answer.ends, answer.error = 1, ""
        except AfserveError as error:
            answer.error = error.message


def hear(answer: Answer, line: str) -> None:
    """A line of the stream."""
    if line == "data: [DONE]":
        answer.ends += 1
        answer.error = "" if answer.error == "not ended" else answer.error
    elif line.startswith("data: {"):
        body = json.loads(line[6:])
        if "error" in body:
            answer.error = body["error"]["message"]
        for choice in body.get("choices", ()):
            answer.text += choice["text"]
            answer.times.append(time.monotonic())


def failed(answers: Sequence[Answer]) -> int:
    return sum(bool(answer.error) for answer in answers)


def altered(answers: Sequence[Answer], reference: Mapping[str, str]) -> int:
    """Answered streams with other text than the undisturbed one."""
    return sum(not answer.error and answer.text != reference[answer.prompt] for answer in answers)


def percentile(values: Sequence[float], share: float) -> float:
    """Zero where there is none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)
