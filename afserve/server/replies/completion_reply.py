"""Answers of /v1/completions: whole bodies, and stream chunks as bytes. Knows no engine and no sockets.

A stream's fixed parts are encoded once per choice; a token costs one small JSON string.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from afserve.engine.scheduling.request import TokenLogprob
from afserve.server.bodies.prepared import EchoText
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.logprobs import Columns, Scored
from afserve.server.replies.routed import RoutedAnswer
from afserve.server.replies.wording import ChunkHeader, Usage, encode, inner, quoted, text_of
from afserve.tokens.tokenizer import Tokenizer

# Tokens of a prompt that are drawn at once: 256 with twenty alternatives take about 5 ms.
TURN = 256


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts to repeat before each choice's text, as words and as tokens."""

    words: EchoText
    ids: tuple["array[int]", ...]

    def scored(self, p: int, logprobs: Sequence[TokenLogprob | None]) -> Iterator[Scored]:
        added, known = self.words.added[p], len(logprobs)
        for i, token_id in enumerate(self.ids[p]):
            yield Scored(token_id, logprobs[i] if i < known else None, i >= added, i == added)


class CompletionDraft:
    """One choice of /v1/completions, or what one event adds to it, as JSON text."""

    def __init__(self, reply: "CompletionReply", index: int, columns: Columns | None) -> None:
        self._reply = reply
        self._text: list[str] = []
        self._characters = 0
        self.index = index
        self.columns = columns
        self.reason: str | None = None

    @property
    def size(self) -> int:
        return self._characters + (0 if self.columns is None else self.columns.size)

    def add_piece(self, piece: TextPiece) -> Iterator[None]:
        """Stops now and then while it draws a long prompt, so that others have their turn."""
        reply, echo = self._reply, self._reply.echo
        if echo is not None and reply.is_first_piece(self.index):
            p = self.index // reply.n
            self._say(echo.words.texts[p])
            if self.columns is not None:
                scored = echo.scored(p, piece.prompt_logprobs)
                while some := list(islice(scored, TURN)):
                    self.columns.add_scores(reply.tokenizer, some)
                    yield
        if echo is None or echo.words.generate:
            self._say(piece.text)
            if self.columns is not None:
                self.columns.add_scores(
                    reply.tokenizer, (reply.scored(self.index, s) for s in piece.logprobs)
                )
        self.reason = piece.finish_reason

    def _say(self, text: str) -> None:
        self._text.append(inner(text))
        self._characters += len(self._text[-1])

    def json_parts(self) -> list[str]:
        logprobs = ["null"] if self.columns is None else self.columns.json_parts()
        routed = self._reply.routed.json(self.index, self.reason)
        return [
            f'{{"index":{self.index},"text":"', "".join(self._text), '","logprobs":', *logprobs,
            f'{routed},"finish_reason":{quoted(self.reason)}}}',
        ]  # fmt: skip


class CompletionReply:
    """Bodies and chunks of /v1/completions. `offsets` remembers where each choice's text has got to."""

    kind = streamed = "text_completion"

    def __init__(
        self,
        header: ChunkHeader,
        tokenizer: Tokenizer,
        n: int,
        logprobs: int | None,
        echo: Echo | None,
        *,
        prompts: Sequence[Sequence[int]] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self.header = header
        self.routed = RoutedAnswer()
        self.tokenizer = tokenizer
        self.n = n
        self.echo = echo
        self.hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._logprobs = logprobs
        self._head = encode(header.fields(self.streamed))
        self._leads: dict[int, str] = {}  # of the chunks of each choice
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._first_words = {
            p * n + i
            for p, ids in enumerate(prompts)
            if all(token_id in self.hidden for token_id in ids)
            for i in range(n)
        }

    def scored(self, index: int, score: TokenLogprob) -> Scored:
        """A generated token of a choice. The text begins with it where nothing of the prompt is shown either."""
        shown = score.token_id not in self.hidden
        begins = shown and index in self._first_words
        if begins:
            self._first_words.discard(index)
        return Scored(score.token_id, score, shown, begins)

    @property
    def is_plain(self) -> bool:
        """Whether no piece needs a draft."""
        return self._logprobs is None and self.echo is None

    def is_first_piece(self, index: int) -> bool:
        """Whether this choice has not begun; it has from now on."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True

    def draft(self, index: int) -> CompletionDraft:
        columns = None if self._logprobs is None else Columns.starting_at(self._offsets.get(index, 0))
        return CompletionDraft(self, index, columns)

    def plain(self, index: int, piece: TextPiece, tail: str) -> bytes | None:
        """The chunk of a piece of text alone; None where it needs a draft."""
        if not self.is_plain:
            return None
        lead = self._leads.get(index)
        if lead is None:
            lead = self._leads[index] = f'data: {self._head[:-1]},"choices":[{{"index":{index},"text":'
        end = f'{self.routed.json(index, piece.finish_reason)},"finish_reason":{quoted(piece.finish_reason)}'
        return f'{lead}{text_of(piece.text)},"logprobs":null{end}}}]{tail}}}\n\n'.encode()

    def chunk(self, draft: CompletionDraft, tail: str) -> bytes:
        if draft.columns is not None:
            self._offsets[draft.index] = draft.columns.offset
        choice = "".join(draft.json_parts())
        return f'data: {self._head[:-1]},"choices":[{choice}]{tail}}}\n\n'.encode()

    def usage(self, usage: Usage) -> dict[str, object]:
        """The one token that is generated and dropped where none was asked for does not count."""
        dropped = self.echo is not None and not self.echo.words.generate
        if dropped:
            return Usage(usage.prompt_tokens, 0, usage.cached_tokens).as_json()
        details = {"completion_tokens_details": usage.of_prediction()} if any(usage.predicted) else {}
        return {**usage.as_json(), **details}
