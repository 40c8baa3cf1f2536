"""The sequences of a request: engine events in, pieces of text out, counted. Whoever answers reads this one loop.

`n` and several prompts become several sequences. Knows no wire format.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from afserve.control.backend import Opened
from afserve.engine.scheduling.request import NO_ORIGIN, GenerationRequest, Origin, Tenant, TokenEvent
from afserve.errors import ModelError, ProtocolError, RequestError
from afserve.server.access.accounts import Account
from afserve.server.answers.answering import Watched
from afserve.server.answers.hosted import Hosted
from afserve.server.answers.writer import PieceWriter
from afserve.server.bodies.prepared import Prepared
from afserve.server.metrics.goodput import Times
from afserve.server.metrics.spans import NOWHERE, Span
from afserve.server.replies.choice import ChoiceDecoder, TextPiece
from afserve.server.replies.record import TURN, Numbered, split
from afserve.tokens.tokenizer import Tokenizer

Piece = tuple[int, TokenEvent, TextPiece]  # of which choice, made of which event
# Pieces that may wait for a slow client, per sequence, before the engine's iterator is no longer read.
HELD_PIECES = 64
# Pieces between two turns of the event loop for others.
FEW = 4


@dataclass(frozen=True, slots=True)
class Task:
    """What to generate: every prompt of `asked` n times, choice p*n+i being the i-th of prompt p.

    `arrived` is when its request was read, on the metrics' clock: times to first token count from there. Its tokens are
    spent by `account`.
    """

    request_id: str
    asked: Prepared
    arrived: float
    account: Account = field(default_factory=Account)
    span: Span = NOWHERE
    origin: Origin = NO_ORIGIN
    watched: Watched | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.asked.prompts)

    @property
    def choices(self) -> int:
        return len(self.asked.prompts) * self.asked.params.n

    def prompt(self, choice: int) -> "array[int]":
        return self.asked.prompts[choice // self.asked.params.n]

    def decoder(self, tokenizer: Tokenizer, choice: int) -> ChoiceDecoder:
        return ChoiceDecoder(
            tokenizer,
            self.asked.params,
            self.prompt(choice),
            skip_special_tokens=self.asked.skip_special_tokens,
            echoes=self.asked.echo is not None,
        )

    def named(self, error: RequestError) -> RequestError:
        """The same in the words of the request, which knows no grammar but the field that it came from."""
        if error.param != "grammar" or not self.asked.format_field:
            return error
        message = error.message.replace("grammar", self.asked.format_field, 1)
        return RequestError(message, param=self.asked.format_field)

    def request(self, choice: int) -> GenerationRequest:
        """Made when it begins: as Python's integers a prompt takes many times its size.

        Its number is its handle until the backend gives it another.
        """
        return GenerationRequest(
            choice,
            tuple(self.prompt(choice)),
            self.asked.params.choice(choice % self.asked.params.n),
            priority=self.asked.scheduling.priority,
            cache_salt=self.asked.scheduling.cache_salt,
            origin=self.origin,
            tenant=Tenant(self.asked.scheduling.tenant, self.asked.scheduling.share),
            ttft=self.asked.scheduling.ttft,
            prediction=tuple(self.asked.expected),
            retain=self.asked.scheduling.retain,
            tiles=self.asked.tiles,
        )


class SequenceRun:
    """One sequence of a task: its events as pieces, counted, whoever brings them and whoever reads them.

    `opened`: where it is computed already, else it is opened when its pieces are read. `paid`: of one that another
    gateway began, the tokens that its key has paid for; nobody knows its times.
    """

    def __init__(
        self,
        model: Hosted,
        task: Task,
        index: int,
        writer: PieceWriter | None = None,
        opened: Opened | None = None,
        paid: int | None = None,
    ) -> None:
        scheduling, prompt = task.asked.scheduling, task.prompt(index)
        self._model, self._task, self._index = model, task, index
        self._writer, self._opened = writer, opened
        self._decoder = task.decoder(model.tokenizer, index)
        self._timer = model.metrics.timer(
            task.arrived,
            len(prompt),
            task.asked.params.max_tokens,
            Times(scheduling.ttft, scheduling.tpot, scheduling.service_class),
        )
        self._timed, self._free, self._began = paid is None, paid or 0, False
        self._failure: Exception | None = None
        self._ids = array("i") if task.asked.written is not None else None

    def _open(self) -> Opened:
        """Nobody takes an event whose piece may be the last before the engine says so, or has to wait for its turn."""
        alone = self._task.choices == 1 and not self._task.asked.params.stop
        taker = self._take if self._writer is not None and alone else None
        return self._model.backend.open(self._task.request(self._index), taker=taker)

    async def pieces(self, *, one_by_one: bool = False) -> AsyncGenerator[Piece, None]:
        """Until one has a finish_reason; with `one_by_one` one for each token. Raises what ends it instead."""
        reason = "abort"
        try:
            opened = self._opened or self._open()
            async with aclosing(opened.events()) as events:
                async for event in events:
                    self._count(event)
                    for number, part in enumerate(split(event) if one_by_one else (event,), 1):
                        piece = self._decoder.decode_event(part)
                        reason = piece.finish_reason or reason
                        if piece.finish_reason is not None:
                            self._keep_answer(part, piece)
                        yield self._index, part, piece
                        if piece.finish_reason is not None:
                            return
                        if number % TURN == 0:
                            await asyncio.sleep(0)
            raise ProtocolError(
                f"{self._task.request_id}-{self._index}: the engine ended it without a reason"
            )
        except ModelError:
            reason = "error"
            raise
        except RequestError as error:
            reason = "error"
            raise self._task.named(error) from error
        finally:
            if self._timed:
                self._timer.end_timing(reason)
            if self._task.span is not NOWHERE:
                self._task.span.sequence(self._timer.phases(), self._timer.attributes(reason))

    def _keep_answer(self, last: TokenEvent, piece: TextPiece) -> None:
        """What stop strings cut is another text than its tokens."""
        if self._ids is None or piece.stop is not None:
            return
        ended = last.stop_token_id is not None and self._ids[-1:] == array("i", (last.stop_token_id,))
        self._model.keep_answer(self._task.asked, self._ids[:-1] if ended else self._ids)

    def _count(self, event: TokenEvent) -> None:
        """Raises what went wrong with an event before."""
        if self._failure is not None:
            raise self._failure
        if self._timed:
            if not self._began:
                self._began, prompt = True, self._task.prompt(self._index)
                self._model.metrics.keys.count_first(self._task.account.owner, len(prompt), event)
            self._timer.saw(event)
        if self._ids is not None:
            self._ids.extend(event.token_ids)
        spent = max(0, len(event.token_ids) - self._free)
        self._free -= len(event.token_ids) - spent
        self._task.account.spend(spent)

    def _take(self, event: TokenEvent) -> bool:
        """The gateway asks, for whom no failure of one request is anything to care about: its reader raises it."""
        assert self._writer is not None
        if not self._writer.can_write():
            return False
        try:
            self._count(event)
            piece = self._decoder.decode_event(event)
            if self._task.watched is not None:
                self._task.watched.saw(self._index, piece.tokens, None)
            self._writer.write_piece(self._index, piece)
        except Exception as error:  # noqa: BLE001 - carried to the reader, whatever it is
            self._failure = error
        return self._failure is None


async def generate(
    model: Hosted, task: Task, writer: PieceWriter | None = None
) -> AsyncGenerator[Numbered, None]:
    """Pieces of every choice until each has a finish_reason, without those that go to `writer`.

    Raises what the backend raises. Closing the iterator cancels every sequence in the engine.
    """
    model.metrics.prompt_tokens.add(task.prompt_tokens)
    task.account.spend(task.prompt_tokens)
    sequences = [SequenceRun(model, task, choice, writer).pieces() for choice in range(task.choices)]
    merged = sequences[0] if len(sequences) == 1 else _merge(sequences)
    taken = 0
    async with aclosing(merged) as pieces:
        async for index, _, piece in pieces:
            if task.watched is not None:
                task.watched.saw(index, piece.tokens, piece.finish_reason)
            yield index, piece
            taken += 1
            if taken % FEW == 0:  # pieces that wait already would be taken without a pause
                await asyncio.sleep(0)


async def _merge(sequences: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Whatever comes first from any of them; the first failure ends all."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(HELD_PIECES * len(sequences))
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
    sequence: AsyncGenerator[Piece, None], queue: "asyncio.Queue[Piece | Exception | None]"
) -> None:
    try:
        async with aclosing(sequence) as pieces:
            async for piece in pieces:
                await queue.put(piece)
    except Exception as error:  # noqa: BLE001 - carried to the one who merges, whatever it is
        await queue.put(error)
    else:
        await queue.put(None)
