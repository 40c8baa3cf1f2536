"""All that a request has been answered so far, as tokens; whoever reads it gets what was, then what comes.

A token is four bytes here, not a piece of text: who comes back has the text made again. Knows no sockets and no clock.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from afserve.engine.scheduling.found_below import NONE_BELOW
from afserve.engine.scheduling.request import (
    NOT_PREDICTED,
    Predicted,
    TokenEvent,
    TokenLogprob,
    sum_predicted,
)
from afserve.engine.scheduling.routed_experts import RoutedExperts, joined
from afserve.errors import RequestError, shown
from afserve.server.replies.choice import ChoiceDecoder, TextPiece

USAGE, DONE = "usage", "done"
MOST_CHOICES = 32  # of a stream that may be resumed: its ids stay short
_MOST_DIGITS = 9


class Position:
    """How far a client is in a stream: of every choice, how many tokens were told and whether the end was.

    It is the id of the stream's last event, by tokens, so that any gateway understands it: `17` stands for 17 tokens of
    a single choice, `17.3e` for 17 of choice 0, and choice 1 ended after 3. `usage` and `done` are the last events. How
    tokens were grouped into events does not matter.
    """

    def __init__(self, tokens: Iterable[int], ended: Iterable[bool], last: str = "") -> None:
        self.tokens, self.ended = list(tokens), list(ended)
        self.last = last

    @classmethod
    def at_start(cls, choices: int) -> "Position":
        return cls([0] * choices, [False] * choices)

    @classmethod
    def parse(cls, text: str, choices: int) -> "Position":
        """Raises RequestError for what is no id of a stream with so many choices."""
        if not text:
            return cls.at_start(choices)
        if text in (USAGE, DONE):
            return cls([0] * choices, [True] * choices, text)
        parts = text.split(".")
        digits = [part.removesuffix("e") for part in parts]
        if len(parts) != choices or not all(_is_count(part) for part in digits):
            raise RequestError.about(
                "Last-Event-ID",
                f"{shown(text)} is no event of this request; send the last `id:` that you have read",
            )
        return cls(map(int, digits), (part.endswith("e") for part in parts))

    def passed(self, index: int, piece: TextPiece) -> None:
        self.tokens[index] += piece.tokens
        self.ended[index] = self.ended[index] or piece.finish_reason is not None

    @property
    def id(self) -> str:
        return ".".join(f"{n}e" if end else str(n) for n, end in zip(self.tokens, self.ended, strict=True))


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS


def stamped(events: bytes, before: str, after: str) -> bytes:
    """Events with ids. Only the last of them says `after`: who has not got it has not got what it stands for."""
    parts = events.split(b"\n\n")[:-1]
    ids = [before] * (len(parts) - 1) + [after]
    return b"".join(b"id: %s\n%s\n\n" % (id.encode(), part) for id, part in zip(ids, parts, strict=True))


Numbered = tuple[int, TextPiece]
TURN = 128  # tokens that are made text again between two turns of the event loop
_TOKEN, _SCORE, _ALTERNATIVE = 4, 150, 90  # bytes that one takes, measured


def bytes_of(tokens: int, logprobs: int | None) -> int:
    """What so many tokens take, with that many alternatives each; None is without log-probabilities."""
    return tokens * (_TOKEN + (0 if logprobs is None else _SCORE + _ALTERNATIVE * logprobs))


@dataclass(slots=True)
class RecordedChoice:
    """One choice. `end` has the reason and no tokens."""

    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    predicted: Predicted = NOT_PREDICTED
    routed: list[RoutedExperts] = field(default_factory=list)
    first: TokenEvent | None = None
    end: TokenEvent | None = None

    def add_event(self, event: TokenEvent, piece: TextPiece) -> None:
        """A stop string may end it before the event's last token."""
        if self.first is None:
            self.first = replace(event, token_ids=(), logprobs=(), finish_reason=None, routed=None)
        self.tokens.extend(event.token_ids[: piece.tokens])
        self.logprobs.extend(event.logprobs[: piece.tokens])
        self.predicted = sum_predicted((self.predicted, event.predicted))
        if piece.routed is not None:
            self.routed.append(piece.routed)
        if piece.finish_reason is not None:
            reason = event.finish_reason or "stop"
            bare = replace(event, token_ids=(), logprobs=(), prompt_logprobs=(), routed=None)
            self.end = replace(bare, finish_reason=reason)

    def again(self, border: int) -> Iterator[TokenEvent]:
        """Everything once more; no event crosses this number of tokens."""
        size, first, end = len(self.tokens), self.first, self.end
        if first is None:
            return
        runs = list(pairwise(sorted({0, size, *range(0, size, TURN), min(border, size)}))) or [(0, 0)]
        if end is not None and 0 < border == size:
            runs.append((size, size))  # the end alone
        for start, stop in runs:
            event = end if end is not None and (start, stop) == runs[-1] else TokenEvent(first.handle, ())
            yield replace(
                event,
                token_ids=tuple(self.tokens[start:stop]),
                logprobs=tuple(self.logprobs[start:stop]),
                prompt_logprobs=first.prompt_logprobs if start == 0 else (),
                routed=joined(self.routed) if start == 0 else None,
                cached_tokens=first.cached_tokens if start == 0 else 0,
                found_below=first.found_below if start == 0 else NONE_BELOW,
                predicted=self.predicted if start == 0 else NOT_PREDICTED,
            )


class AnswerRecord:
    """Of one request. Its writer adds what comes; readers follow, each in its own queue.

    With `exact` what was is told token by token again, else many at a time.
    """

    def __init__(self, choices: int, *, exact: bool = False) -> None:
        self._exact = exact
        self.told = [RecordedChoice() for _ in range(choices)]
        self.failure: Exception | None = None
        self._readers: set[asyncio.Queue[Numbered | Exception]] = set()

    @property
    def finished(self) -> bool:
        return self.failure is not None or all(one.end is not None for one in self.told)

    def record_piece(self, index: int, event: TokenEvent, piece: TextPiece) -> None:
        self.told[index].add_event(event, piece)
        for queue in self._readers:
            queue.put_nowait((index, piece))

    def record_failure(self, error: Exception) -> None:
        """It ends with this, for everyone who reads it."""
        if not self.finished:
            self.failure = error
            for queue in self._readers:
                queue.put_nowait(error)

    async def follow(
        self, decoder: Callable[[int], ChoiceDecoder], since: Position
    ) -> AsyncGenerator[Numbered, None]:
        """Every piece of every choice until all have ended; those before `since` are `old`. `decoder` makes one for a
        choice. Raises the failure."""
        queue: asyncio.Queue[Numbered | Exception] = asyncio.Queue()
        self._readers.add(queue)
        failure = self.failure
        again = [
            (index, event)
            for index, one in enumerate(self.told)
            for event in one.again(0 if since.ended[index] else since.tokens[index])
        ]
        open_choices = sum(one.end is None for one in self.told)
        passed = Position.at_start(len(self.told))
        try:
            decoders = [decoder(index) for index in range(len(self.told))]
            for index, event in again:
                for part in split(event) if self._exact else (event,):
                    yield index, _seen(decoders[index].decode_event(part), index, passed, since)
                await asyncio.sleep(0)
            if failure is not None:
                raise failure
            while open_choices:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                index, piece = item
                open_choices -= piece.finish_reason is not None
                yield index, _seen(piece, index, passed, since)
        finally:
            self._readers.discard(queue)


def _seen(piece: TextPiece, index: int, passed: Position, since: Position) -> TextPiece:
    """Whether the client has it: all of its tokens, and the end if it is one."""
    passed.passed(index, piece)
    told = passed.tokens[index] <= since.tokens[index]
    ends = piece.finish_reason is not None
    old = since.ended[index] or (told and not ends and since.tokens[index] > 0)
    return replace(piece, old=True) if old else piece


def split(event: TokenEvent) -> Iterator[TokenEvent]:
    """Token by token, so that any position of a client is between two of them."""
    last = len(event.token_ids) - 1
    if last < 1:
        yield event
        return
    for i, token in enumerate(event.token_ids):
        yield replace(
            event if i == last else TokenEvent(event.handle, ()),
            token_ids=(token,),
            logprobs=event.logprobs[i : i + 1],
            prompt_logprobs=event.prompt_logprobs if i == 0 else (),
            routed=event.routed if i == 0 else None,
            cached_tokens=event.cached_tokens if i == 0 else 0,
            found_below=event.found_below if i == 0 else NONE_BELOW,
            predicted=event.predicted if i == 0 else NOT_PREDICTED,
        )
