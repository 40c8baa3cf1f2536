"""The sequences of one HTTP request, run together: engine events in, numbered pieces of text out.

`n` and several prompts become several sequences. Closing the iterator cancels every one of them in the
engine. Knows no wire format.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from afserve.control.backend import Backend
from afserve.control.requests import Taker
from afserve.engine.scheduling.request import (
    NO_ORIGIN,
    GenerationRequest,
    Origin,
    SamplingParams,
    Tenant,
    TokenEvent,
)
from afserve.errors import ModelError, ProtocolError, RequestError
from afserve.server.access.accounts import Account
from afserve.server.answers.running import Watched
from afserve.server.bodies.scheduling import Scheduling
from afserve.server.metrics.goodput import Times
from afserve.server.metrics.observe import RequestTimer, ServerMetrics
from afserve.server.metrics.spans import NOWHERE, Span
from afserve.server.replies.choice import ChoiceDecoder, TextPiece
from afserve.tokens.tokenizer import Tokenizer

Numbered = tuple[int, TextPiece]
# Pieces that may wait for a slow client, per sequence, before the engine's iterator is no longer read.
HELD_PIECES = 64
# Pieces between two turns of the event loop for others.
TURN = 4


@dataclass(frozen=True, slots=True)
class Task:
    """What to generate: every prompt `params.n` times, choice p*n+i being the i-th of prompt p.

    `arrived` is when its request was read, on the metrics' clock: times to first token count from there. Its tokens are
    spent by `account`. `format_field` is the field that asked for a grammar.
    """

    request_id: str
    prompts: tuple["array[int]", ...]
    params: SamplingParams
    arrived: float
    skip_special_tokens: bool = True
    scheduling: Scheduling = field(default_factory=Scheduling)
    account: Account = field(default_factory=Account)
    span: Span = NOWHERE
    origin: Origin = NO_ORIGIN
    watched: Watched | None = None
    echoes: bool = False
    format_field: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.prompts)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n

    def named(self, error: RequestError) -> RequestError:
        """The same in the words of the request, which knows no grammar but the field that it came from."""
        if error.param != "grammar" or not self.format_field:
            return error
        message = error.message.replace("grammar", self.format_field, 1)
        return RequestError(message, param=self.format_field)

    def request(self, choice: int) -> GenerationRequest:
        """Made when it begins: as Python's integers a prompt takes many times its size.

        Its number is its handle until the backend gives it another.
        """
        p, i = divmod(choice, self.params.n)
        return GenerationRequest(
            choice,
            tuple(self.prompts[p]),
            self.params.choice(i),
            priority=self.scheduling.priority,
            cache_salt=self.scheduling.cache_salt,
            origin=self.origin,
            tenant=Tenant(self.scheduling.tenant, self.scheduling.share),
            ttft=self.scheduling.ttft,
        )


class PieceTaker(Protocol):
    """Where pieces go without a turn of the event loop, while their reader waits for the next one."""

    def takes(self) -> bool:
        """Whether it would take a piece now."""
        ...

    def take(self, index: int, piece: TextPiece) -> None:
        """One that ends nothing."""
        ...


class _Sequence:
    """What is done with each event of one sequence, whoever brings it."""

    __slots__ = ("_account", "_alone", "_decoder", "_failure", "_index", "_pieces", "_timer", "_watched")

    def __init__(
        self, index: int, task: Task, decoder: ChoiceDecoder, timer: RequestTimer, taker: PieceTaker | None
    ) -> None:
        self._index, self._decoder, self._timer, self._pieces = index, decoder, timer, taker
        self._account, self._watched = task.account, task.watched
        self._alone = task.choices == 1 and not task.params.stop
        self._failure: Exception | None = None

    @property
    def taker(self) -> Taker | None:
        """None where a piece may be the last before the engine says so, or others wait for their turn."""
        return self._take if self._pieces is not None and self._alone else None

    def piece(self, event: TokenEvent) -> TextPiece:
        """Raises what went wrong with an event before."""
        if self._failure is not None:
            raise self._failure
        self._timer.saw(event)
        self._account.spend(len(event.token_ids))
        return self._decoder.feed(event)

    def _take(self, event: TokenEvent) -> bool:
        """The gateway asks, for whom no failure of one request is anything to care about: its reader raises it."""
        assert self._pieces is not None
        if not self._pieces.takes():
            return False
        try:
            piece = self.piece(event)
            if self._watched is not None:
                self._watched.saw(self._index, piece.tokens, None)
            self._pieces.take(self._index, piece)
        except Exception as error:  # noqa: BLE001 - carried to the reader, whatever it is
            self._failure = error
        return self._failure is None


class Generator:
    """Runs tasks on a backend. Holds no request itself."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, metrics: ServerMetrics) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def run(self, task: Task, taker: PieceTaker | None = None) -> AsyncGenerator[Numbered, None]:
        """Pieces of every choice until each has a finish_reason, without those that `taker` takes.

        Raises what the backend raises.
        """
        self._metrics.prompt_tokens.add(task.prompt_tokens)
        task.account.spend(task.prompt_tokens)
        sequences = [self._sequence(choice, task, taker) for choice in range(task.choices)]
        merged = sequences[0] if len(sequences) == 1 else _merge(sequences)
        taken = 0
        async with aclosing(merged) as pieces:
            async for index, piece in pieces:
                if task.watched is not None:
                    task.watched.saw(index, piece.tokens, piece.finish_reason)
                yield index, piece
                taken += 1
                if taken % TURN == 0:  # pieces that wait already would be taken without a pause
                    await asyncio.sleep(0)

    async def _sequence(
        self, index: int, task: Task, taker: PieceTaker | None
    ) -> AsyncGenerator[Numbered, None]:
        request = task.request(index)
        decoder = ChoiceDecoder(
            self._tokenizer,
            request.params,
            request.prompt_ids,
            skip_special_tokens=task.skip_special_tokens,
            echoes=task.echoes,
        )
        times = Times(task.scheduling.ttft, task.scheduling.tpot)
        timer = self._metrics.timer(task.arrived, len(request.prompt_ids), request.params.max_tokens, times)
        sequence = _Sequence(index, task, decoder, timer, taker)
        reason = "abort"
        try:
            async with aclosing(self._backend.generate(request, sequence.taker)) as events:
                async for event in events:
                    piece = sequence.piece(event)
                    if piece.finish_reason is not None:
                        reason = piece.finish_reason
                    yield index, piece
                    if piece.finish_reason is not None:
                        return
            raise ProtocolError(f"{task.request_id}-{index}: the engine ended it without a reason")
        except ModelError:
            reason = "error"
            raise
        except RequestError as error:
            reason = "error"
            raise task.named(error) from error
        finally:
            timer.ended(reason)
            if task.span is not NOWHERE:
                task.span.sequence(timer.phases(), timer.attributes(reason))


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
