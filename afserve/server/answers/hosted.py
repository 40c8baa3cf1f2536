"""The models of one gateway: who computes each, how its tokens are words, and what is counted of its requests."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.control.backend import Backend
from afserve.errors import AfserveError, RequestError
from afserve.server.answers.earlier import AnswerTokens
from afserve.server.bodies.prepared import Prepared
from afserve.server.metrics.goodput import ANY_TIME, Times
from afserve.server.metrics.observe import ServerMetrics
from afserve.server.text.preparers import unserved
from afserve.tokens.tokenizer import Tokenizer


class StaysWarm(Protocol):
    """Who looks after prompts that were warmed."""

    def warmed(self, asked: Prepared) -> None:
        """Its prompts are to stay, for as long as it says."""

    def unpinned(self, owner: str | None, prompt: "array[int]", salt: str) -> None:
        """They need not any more: this prompt with its salt, all where it is empty; of this key, None for all."""

    async def left(self) -> bool:
        """Waits until nothing of what was let go is computed, for a second at most; whether that is so. What is
        computed still may be kept again."""


@dataclass(frozen=True, slots=True)
class Hosted:
    backend: Backend
    tokenizer: Tokenizer
    metrics: ServerMetrics
    earlier: AnswerTokens
    advice: Adviser
    keeper: ThreadPoolExecutor
    keeping_warm: list[StaysWarm] = field(default_factory=list)
    followers: list[Callable[[Prepared, "array[int]", "Future[None] | None"], None]] = field(
        default_factory=list
    )

    @classmethod
    def over_backend(
        cls,
        backend: Backend,
        tokenizer: Tokenizer,
        clock: Clock,
        times: Times = ANY_TIME,
        answer_tokens: int = 0,
    ) -> "Hosted":
        """`times` are those that the server asks for, `answer_tokens` those of earlier answers that it keeps."""
        metrics = ServerMetrics(clock, times, backend.draw_counts)
        earlier = AnswerTokens(tokenizer, answer_tokens)
        advice, keeper = Adviser("keeping token ids of answers"), ThreadPoolExecutor(1, "earlier-answers")
        return cls(backend, tokenizer, metrics, earlier, advice, keeper)

    @property
    def model_name(self) -> str:
        """What answers have."""
        return self.backend.model.name

    def as_generated(self, asked: Prepared) -> Prepared:
        """With the token ids of earlier answers in its prompt, which makes room for the few that they are more."""
        if asked.written is None:
            return asked
        prompt = self.earlier.as_generated(asked.written, asked.scheduling.cache_salt)
        room = min(asked.params.max_tokens, self.backend.model.max_model_len - len(prompt))
        if prompt is asked.written or room < max(1, asked.params.min_tokens):
            return asked
        return replace(asked, prompts=(prompt,), params=replace(asked.params, max_tokens=room))

    def keep_answer(self, asked: Prepared, ids: "array[int]") -> None:
        """For the turns that follow; a thread finds out whether they differ from what the tokenizer writes. Followers
        are told when it began."""
        kept = self.keeper.submit(self._keep, asked, ids) if self.earlier.takes(ids) else None
        for follower in self.followers:
            follower(asked, ids, kept)

    def end_keeping(self) -> None:
        """Once nothing is answered any more: what waits to be kept is not, and the thread ends."""
        self.keeper.shutdown(wait=False, cancel_futures=True)

    def _keep(self, asked: Prepared, ids: "array[int]") -> None:
        prompt, salt = asked.written, asked.scheduling.cache_salt
        if prompt is not None:
            now = self.metrics.clock.now()
            self.advice.ask(now, lambda: self.earlier.keep_answer(prompt, ids, salt), None)


class Models:
    """In the order in which they were asked for; requests without a model are the first one's."""

    def __init__(self, hosted: Sequence[Hosted]) -> None:
        self._hosted = tuple(hosted)
        self._named = {name: each for each in hosted for name in each.backend.model.names}

    def __iter__(self) -> Iterator[Hosted]:
        return iter(self._hosted)

    def __len__(self) -> int:
        return len(self._hosted)

    @property
    def first_model(self) -> Hosted:
        return self._hosted[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """What requests may say, aliases included."""
        return tuple(self._named)

    def named(self, name: str) -> Hosted:
        """By any of its names. Raises NotFoundError that lists them."""
        if (found := self._named.get(name)) is None:
            raise unserved(name, self.served_names)
        return found

    def one(self, name: str | None) -> Hosted:
        """The one that a change is for. Raises RequestError where there are several and none is named."""
        if name is None and len(self) > 1:
            raise RequestError.about(
                "model",
                f"{len(self)} models are served here; say which with ?model=NAME, one of "
                f"{', '.join(each.model_name for each in self)}",
            )
        return self.first_model if name is None else self.named(name)

    def check_any_serves(self) -> None:
        """Raises the first one's reason where none of them takes requests."""
        reasons: list[AfserveError] = []
        for each in self:
            try:
                each.backend.check()
            except AfserveError as error:
                reasons.append(error)
            else:
                return
        raise reasons[0]
