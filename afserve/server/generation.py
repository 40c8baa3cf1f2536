"""The sequences of one HTTP request, run together: engine events in, numbered pieces of text out.

`n` and several prompts become several sequences. Closing the iterator cancels every one of them in the
engine. Knows no wire format.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from afserve.engine.request import GenerationRequest, SamplingParams
from afserve.errors import ProtocolError
from afserve.server.backend import Backend
from afserve.server.choice import ChoiceDecoder, Piece
from afserve.server.observe import ServerMetrics
from afserve.tokenizer import Tokenizer

Numbered = tuple[int, Piece]
# Pieces that may wait for a slow client, per sequence, before the engine's iterator is no longer read.
HELD_PIECES = 64


@dataclass(frozen=True, slots=True)
class Task:
    """What to generate: every prompt `params.n` times, choice p*n+i being the i-th of prompt p.

    `arrived` is when its request was read, on the metrics' clock: times to first token count from there.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    arrived: float
    skip_special_tokens: bool = True

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.prompts)

    def requests(self) -> tuple[GenerationRequest, ...]:
        """One for each choice, whose number is its handle until the backend gives it another."""
        return tuple(
            GenerationRequest(p * self.params.n + i, ids, one)
            for p, ids in enumerate(self.prompts)
            for i, one in enumerate(self.params.choices())
        )


class Generator:
    """Runs tasks on a backend. Holds no request itself."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, metrics: ServerMetrics) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def run(self, task: Task) -> AsyncGenerator[Numbered, None]:
        """Pieces of every choice until each has a finish_reason. Raises what the backend raises."""
        self._metrics.prompt_tokens.add(task.prompt_tokens)
        sequences = [self._sequence(i, request, task) for i, request in enumerate(task.requests())]
        merged = sequences[0] if len(sequences) == 1 else _merge(sequences)
        async with aclosing(merged) as pieces:
            async for piece in pieces:
                yield piece

    async def _sequence(
        self, index: int, request: GenerationRequest, task: Task
    ) -> AsyncGenerator[Numbered, None]:
        decoder = ChoiceDecoder(self._tokenizer, request.params, skip_special_tokens=task.skip_special_tokens)
        timer = self._metrics.timer(task.arrived)
        reason = "abort"
        try:
            async with aclosing(self._backend.generate(request)) as events:
                async for event in events:
                    timer.saw(event)
                    piece = decoder.feed(event)
                    if piece.finish_reason is not None:
                        reason = piece.finish_reason
                    yield index, piece
                    if piece.finish_reason is not None:
                        return
            raise ProtocolError(f"{task.request_id}-{index}: the engine ended it without a reason")
        finally:
            timer.ended(reason)


async def _merge(sequences: Sequence[AsyncGenerator[Numbered, None]]) -> AsyncGenerator[Numbered, None]:
    """Whatever comes first from any of them; the first failure ends all."""
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(HELD_PIECES * len(sequences))
    tasks = [asyncio.create_task(_pump(sequence, queue)) for sequence in sequences]
    open_sequences = len(tasks)
    try:
        while open_sequences:
            item = await queue.get()
            if item is None:
                open_sequences -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    sequence: AsyncGenerator[Numbered, None], queue: "asyncio.Queue[Numbered | Exception | None]"
) -> None:
    try:
        async with aclosing(sequence) as pieces:
            async for piece in pieces:
                await queue.put(piece)
    except Exception as error:  # noqa: BLE001 - carried to the one who merges, whatever it is
        await queue.put(error)
    else:
        await queue.put(None)
