"""Requests that outlive their connection: computed whether anybody reads or not, kept for a time, found by their id.

One that this gateway does not know may be another's, or that of one which has gone: the attention nodes are asked, and
it goes on here. Bounded in number and in memory; what has ended makes room first.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from afserve.control.backend import Kept, Opened
from afserve.control.questions import GivenAwayError
from afserve.engine.scheduling.request import NO_ORIGIN, Origin
from afserve.engine.scheduling.routed_experts import MOST_BYTES
from afserve.errors import AfserveError, DeadlineError, NotFoundError, OverloadedError, RequestError, shown
from afserve.server.access.accounts import Account, Accounts
from afserve.server.access.fair_room import has_room
from afserve.server.answers.answering import within
from afserve.server.answers.asked import Asked
from afserve.server.answers.generation import SequenceRun, Task
from afserve.server.answers.hosted import Hosted, Models
from afserve.server.http.body import ClientGone
from afserve.server.http.settings import MIB, ServerSettings
from afserve.server.replies.record import MOST_CHOICES, AnswerRecord, Numbered, Position, bytes_of

log = logging.getLogger("afserve.server")


class ResumedElsewhere(ClientGone):
    """The client has come back by another connection, or will: this one is closed without an end."""

    reason, aborts = "resumed", True


class Resumable:
    """One request. `size` in bytes, of what it may take at most."""

    def __init__(self, asked: Asked, task: Task, opened: Sequence[Opened]) -> None:
        self.asked, self.task, self.opened = asked, task, list(opened)
        self.record = AnswerRecord(asked.choices, exact=asked.exact)
        self.readers = 0
        self.expires: asyncio.TimerHandle | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.size = size_of(asked)


class Resumables:
    def __init__(self, models: Models, settings: ServerSettings, accounts: Accounts) -> None:
        self._models, self._settings, self._accounts = models, settings, accounts
        self._kept: dict[str, Resumable] = {}
        self._held = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._finding: dict[tuple[str, str], asyncio.Task[Resumable]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def count_readers(self, model: str) -> int:
        return sum(one.readers for one in self._kept.values() if one.asked.prepared.model == model)

    # ---- the life of one

    def open_kept(
        self, asked: Asked, arrived: float, account: Account, origin: Origin = NO_ORIGIN
    ) -> Resumable:
        """Raises RequestError for what cannot be kept, OverloadedError where there is no room."""
        self._check(asked)
        keeps = asked.keeps()
        self._make_room(asked.owner, size_of(asked))
        task = asked.task(arrived, account, origin=origin)
        backend = self._model(asked).backend
        opened = [backend.open(task.request(i), keep) for i, keep in enumerate(keeps)]
        left = [asked.prepared.scheduling.deadline] * len(opened)
        return self._begin(Resumable(asked, task, opened), left)

    def _check(self, asked: Asked) -> None:
        most = self._settings.resume_seconds
        if asked.kept_seconds > most:
            raise RequestError.about(
                "resume",
                f"{asked.kept_seconds:g} s, this server keeps requests for at most {most:g} s (--resume-seconds)",
            )
        if asked.choices > MOST_CHOICES:
            raise RequestError.about(
                "resume", f"{asked.choices} choices, at most {MOST_CHOICES} can be kept; send it in parts"
            )
        if asked.id in self._kept:
            raise RequestError.about("request_id", "is in use; draw another")

    def _make_room(self, owner: str, size: int) -> None:
        """Where there are keys, this one's answers that have ended and that nobody reads go first, the oldest first;
        another's never do. Else all are alike."""
        whose = self._whose(owner)
        own = [one for one in self._kept.values() if self._whose(one.asked.owner) == whose]
        ended = [one for one in own if one.record.finished and not one.readers]
        while not self._has_room(whose, own, size):
            if not ended or not has_room(whose, 0, 0, size, self._settings.resume_mib * MIB):
                raise self._full(whose, own)
            own.remove(ended[0])
            self.forget_kept(ended.pop(0))

    def _whose(self, owner: str) -> str:
        """Without keys anybody may make up as many owners as there are headers."""
        return owner if self._accounts.ring.has_users else ""

    def _has_room(self, whose: str, own: Sequence[Resumable], size: int) -> bool:
        most, held = self._settings, sum(one.size for one in own)
        return has_room(whose, len(own), len(self._kept), 1, most.resume_requests) and has_room(
            whose, held, self._held, size, most.resume_mib * MIB
        )

    def _full(self, whose: str, own: Sequence[Resumable]) -> OverloadedError:
        share = f" ({len(own)} of them are this key's, which leaves as much to others)" if whose else ""
        return OverloadedError(
            f"resume: {len(self._kept)} requests with {self._held // MIB} MiB are kept{share}, at most "
            f"{self._settings.resume_requests} (--resume-requests) with {self._settings.resume_mib} MiB "
            "(--resume-mib) are; send this one later, or without resume"
        )

    def _begin(
        self, one: Resumable, left: Sequence[float | None], charged: Sequence[int] | None = None
    ) -> Resumable:
        """`left` has what of each choice's deadline there still is, in seconds.

        `charged`, of a request that another gateway began: the tokens of each choice that the key has paid for.
        """
        self._kept[one.asked.id] = one
        self._held += one.size
        one.tasks = [
            asyncio.create_task(
                self._compute(one, i, opened, left[i], None if charged is None else charged[i])
            )
            for i, opened in enumerate(one.opened)
        ]
        return one

    async def _compute(
        self, one: Resumable, index: int, opened: Opened, left: float | None, charged: int | None
    ) -> None:
        """What nobody has read yet, and may never, is recorded all the same."""
        one_by_one = charged is not None or one.asked.exact
        deadline = None if left is None else one.asked.prepared.scheduling.deadline
        run = SequenceRun(self._model(one.asked), one.task, index, opened=opened, paid=charged)
        try:
            async with within(deadline, left), aclosing(run.pieces(one_by_one=one_by_one)) as pieces:
                async for _, event, piece in pieces:
                    one.record.record_piece(index, event, piece)
                    if piece.finish_reason is not None:
                        opened.halt()
        except GivenAwayError:
            self._drop(one, ResumedElsewhere())
        except DeadlineError as error:
            self._fail(one, opened, error)
            opened.discard()
        except AfserveError as error:
            self._fail(one, opened, error)
        except Exception as error:
            self._fail(one, opened, error)
            log.exception("%s failed", one.asked.id)

    def _fail(self, one: Resumable, opened: Opened, error: Exception) -> None:
        """What ended it stays kept where it is computed, for whoever asks later; its other choices do not."""
        one.record.record_failure(error)
        for other in one.opened:
            if other is not opened:
                other.discard()

    def _model(self, asked: Asked) -> Hosted:
        return self._models.named(asked.prepared.model)

    def forget_kept(self, one: Resumable) -> None:
        """Its time is over, or its client says so: what still runs is cancelled."""
        self._drop(one, NotFoundError("this request was ended by its client"))
        for opened in one.opened:
            opened.discard()

    def leave_all(self) -> None:
        """This gateway goes; whoever comes next finds all of them where they are computed."""
        for one in list(self._kept.values()):
            self._drop(one, ResumedElsewhere())
            for opened in one.opened:
                opened.leave()

    async def end_all(self) -> None:
        """The run ends, or this gateway has left all of them."""
        for one in list(self._kept.values()):
            self.forget_kept(one)
        await asyncio.gather(*self._ending, *self._finding.values(), return_exceptions=True)

    def _drop(self, one: Resumable, why: Exception) -> None:
        if self._kept.get(one.asked.id) is one:
            del self._kept[one.asked.id]
            self._held -= one.size
        if one.expires is not None:
            one.expires.cancel()
        one.record.record_failure(why)
        for task in one.tasks:
            if task is not asyncio.current_task() and not task.done():
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    # ---- who reads

    @contextmanager
    def reading(self, one: Resumable) -> Iterator[None]:
        """While anybody reads, it does not expire."""
        if one.expires is not None:
            one.expires.cancel()
        one.readers += 1
        try:
            yield
        finally:
            one.readers -= 1
            if not one.readers and self._kept.get(one.asked.id) is one:
                self._wait(one)

    def _wait(self, one: Resumable) -> None:
        loop = asyncio.get_running_loop()
        one.expires = loop.call_later(one.asked.kept_seconds, self.forget_kept, one)

    def pieces(self, one: Resumable, since: Position) -> AsyncGenerator[Numbered, None]:
        tokenizer = self._model(one.asked).tokenizer
        return one.record.follow(lambda index: one.task.decoder(tokenizer, index), since)

    # ---- who comes back

    async def find_kept(self, id: str, owner: str, account: Account) -> Resumable:
        """Raises NotFoundError for what is not known or not `owner`'s: nobody is told which.

        `account` is the owner's here: it pays for what is computed from now on.
        """
        return self.here(id, owner) or await self._found(id, owner, account)

    def here(self, id: str, owner: str) -> Resumable | None:
        """None where this gateway does not know it. Raises NotFoundError where it is another owner's."""
        one = self._kept.get(id)
        if one is not None and one.asked.owner != owner:
            raise unknown(id)
        return one

    async def elsewhere(self, id: str, owner: str) -> tuple[Asked, Sequence[Kept]]:
        """What attention nodes keep of it for other gateways; it stays theirs."""
        kept = await self._find(id)
        if not kept:
            raise unknown(id)
        asked = Asked.restored(kept[0].about, {one.choice: one.prompt_ids for one in kept})
        if asked.owner != owner:
            raise unknown(id)
        return asked, kept

    async def _find(self, id: str) -> Sequence[Kept]:
        """Whichever model's nodes keep it. Raises UnavailableError where it is found nowhere and not all could say."""
        unsaid: AfserveError | None = None
        for model in self._models:
            try:
                if kept := await model.backend.find(id, take=False):
                    return kept
            except AfserveError as error:
                unsaid = error
        if unsaid is not None:
            raise unsaid
        return ()

    async def _found(self, id: str, owner: str, account: Account) -> Resumable:
        """Adopted once, however many ask at the same time."""
        key = id, owner
        if (task := self._finding.get(key)) is None:
            task = self._finding[key] = asyncio.create_task(self._adopt(id, owner, account))
            task.add_done_callback(lambda _: self._finding.pop(key))
        return await asyncio.shield(task)

    async def _adopt(self, id: str, owner: str, account: Account) -> Resumable:
        """Looked at before it is taken, so that nobody takes what is another's."""
        asked, _ = await self.elsewhere(id, owner)
        self._make_room(asked.owner, size_of(asked))
        model = self._model(asked)
        kept = await model.backend.find(id, take=True)
        if not kept:
            raise unknown(id)
        task, by_choice = asked.task(model.metrics.clock.now(), account), {one.choice: one for one in kept}
        opened, rest = [], asked.seconds_left(time.time())
        left = [None if (k := by_choice.get(i)) and k.ended else rest for i in range(asked.choices)]
        for keep in asked.keeps():
            request, there = task.request(keep.choice), by_choice.get(keep.choice)
            opened.append(model.backend.open(request, keep) if there is None else there.open(request))
        charged = [k.count - k.unheard if (k := by_choice.get(i)) else 0 for i in range(asked.choices)]
        one = self._begin(Resumable(asked, task, opened), left, charged)
        self._accounts.goes_on(account, one.tasks, adopted=True)
        self._wait(one)
        log.info("%s goes on here, with %d tokens", id, sum(one.count for one in kept))
        return one


def unknown(id: str) -> NotFoundError:
    return NotFoundError.about(
        "request",
        f"{shown(id)} is neither running nor kept here: it has ended, and if it was asked for with resume its time "
        "is over",
    )


def size_of(asked: Asked) -> int:
    """The most that it can take here: prompts, a grammar, and all tokens that it may get."""
    params = asked.prepared.params
    ids = sum(map(len, asked.prepared.prompts))
    echoed = 0 if params.prompt_logprobs is None else bytes_of(ids, params.prompt_logprobs) * params.n
    told = asked.choices * bytes_of(params.max_tokens, params.logprobs)
    routed = MOST_BYTES if params.return_routed_experts else 0
    return 4096 + 4 * (ids + len(params.grammar)) + echoed + told + routed
