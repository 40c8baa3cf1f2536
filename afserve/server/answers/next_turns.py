"""With --warm-ahead: once a chat is answered, what is certain of its next turn is computed while nobody asks; and so
are prompts that were warmed, once more, for as long as they are to stay: nodes may have been restarted meanwhile.

Nodes do that when they have nothing else to do, and leave it at once for whoever asks. What it takes here is time of
a text process, where one is free. A conversation whose next turn is asked meanwhile finds what there is.
"""

import asyncio
import json
import logging
from array import array
from collections import Counter, OrderedDict
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace

from afserve.engine.scheduling.request import AHEAD_PRIORITY, GenerationRequest, SamplingParams, Tenant
from afserve.errors import AfserveError, UnavailableError
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.declared import Scheduling
from afserve.server.bodies.prepared import Prepared
from afserve.server.text.kinds import BodyKind
from afserve.server.text.text_pool import TextPool

log = logging.getLogger("afserve.server")
MOST = 64  # conversations at a time; of others nothing is computed
SECONDS = 300.0  # then who was answered is hardly there any more
PAUSE = 30.0  # seconds between two looks after warm prompts
_LEAVES = 1.0  # seconds that what is let go may take to be computed no more
_LOOK = 0.05  # seconds between two looks for a free text process
_Warm = tuple[str, bytes, str]  # its owner, token ids and a salt
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


async def compute_ahead(model: Hosted, scheduling: Scheduling, prompt: "array[int]", retain: float) -> None:
    """As what its asker would send, behind all that anybody waits for; to stay for `retain` seconds. Raises what the
    backend raises."""
    request = GenerationRequest(
        0,
        tuple(prompt),
        _ONE_TOKEN,
        priority=AHEAD_PRIORITY,
        cache_salt=scheduling.cache_salt,
        tenant=Tenant(scheduling.tenant, scheduling.share),
        retain=retain,
    )
    async with aclosing(model.backend.open(request).events()) as events:
        async for _ in events:
            pass


class NextTurns:
    """Of one model of a gateway. All calls come from its event loop."""

    def __init__(self, text: TextPool, model: Hosted) -> None:
        self._text, self._model = text, model
        self._tasks: dict[asyncio.Task[None], Scheduling] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def answered(self, asked: Prepared, answer: "array[int]", kept: "Future[None] | None") -> None:
        """These token ids are the answer. Once `kept` is done they stand in prompts that follow."""
        if asked.body and asked.scheduling.ahead and asked.params.n == 1 and len(self._tasks) < MOST:
            task = asyncio.get_running_loop().create_task(self._compute(asked, answer, kept))
            self._tasks[task] = asked.scheduling
            task.add_done_callback(self._tasks.pop)

    def warmed(self, asked: Prepared) -> None:
        """No turn follows it."""

    def unpinned(self, owner: str | None, prompt: "array[int]", salt: str) -> None:
        """What is pinned with a next turn may be what is let go, also of one prompt: it is not computed."""
        for task, scheduling in list(self._tasks.items()):
            if owner in (None, _owner(scheduling)) and (not prompt or scheduling.cache_salt == salt):
                task.cancel()

    async def left(self) -> bool:
        leaving = [task for task in self._tasks if task.cancelling()]
        return not leaving or not (await asyncio.wait(leaving, timeout=_LEAVES))[1]

    async def _compute(self, asked: Prepared, answer: "array[int]", kept: "Future[None] | None") -> None:
        try:
            async with asyncio.timeout(SECONDS):
                if kept is not None:
                    await asyncio.shield(asyncio.wrap_future(kept))  # kept also where this ends
                prompt = await self._prompt(asked, answer)
                await compute_ahead(self._model, asked.scheduling, prompt, asked.scheduling.retain)
        except TimeoutError:
            return  # its turn never came
        except AfserveError as error:
            log.info("the next turn of %s is not computed ahead: %s", asked.model, error.message)

    async def _prompt(self, asked: Prepared, answer: "array[int]") -> "array[int]":
        while not self._text.idle:
            await asyncio.sleep(_LOOK)
        head = json.dumps({"model": asked.model, "kind": asked.kind, "answer": answer.tolist()}).encode()
        prepared = await self._text.prepare(BodyKind.NEXT_TURN, head[:-1] + b',"asked":' + asked.body + b"}")
        assert isinstance(prepared, Prepared)
        own = self._model.as_generated(replace(prepared, scheduling=asked.scheduling))
        return own.prompts[0]

    async def end(self) -> None:
        """The gateway stops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class WarmPrompts:
    """Prompts of one model that a client has warmed, the last one first. A prompt that nodes still have costs them the
    end of it. Beyond `MOST` whoever has most of them loses the one that was warmed first."""

    def __init__(self, model: Hosted, pause: float = PAUSE) -> None:
        self._model, self._pause = model, pause
        self.kept: OrderedDict[_Warm, tuple[float, Scheduling]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._computed: tuple[_Warm, asyncio.Timeout] | None = None  # what is looked after now
        self._idle = asyncio.Event()
        self._idle.set()

    def warmed(self, asked: Prepared) -> None:
        until = self._model.metrics.clock.now() + asked.scheduling.retain
        for prompt in asked.prompts:
            key = _owner(asked.scheduling), prompt.tobytes(), asked.scheduling.cache_salt
            known = self.kept.get(key)
            self.kept[key] = until if known is None else max(until, known[0]), asked.scheduling
            self.kept.move_to_end(key)
            if len(self.kept) > MOST:
                self._give_up()

    def _give_up(self) -> None:
        now = self._model.metrics.clock.now()
        for key in [key for key, (until, _) in self.kept.items() if until <= now]:
            self._drop(key)
        if len(self.kept) > MOST:
            most = Counter(owner for owner, _, _ in self.kept).most_common(1)[0][0]
            self._drop(next(key for key in self.kept if key[0] == most))

    def unpinned(self, owner: str | None, prompt: "array[int]", salt: str) -> None:
        """With a prompt goes what it begins with: their blocks are the same."""
        told = prompt.tobytes()
        for key in list(self.kept):
            whose, tokens, own_salt = key
            if owner in (None, whose) and (not told or (told.startswith(tokens) and own_salt == salt)):
                self._drop(key)

    def _drop(self, key: _Warm) -> None:
        self.kept.pop(key, None)
        if self._computed is not None and self._computed[0] == key:
            limit, self._computed = self._computed[1], None
            if not limit.expired():  # one that is, ends already, and cannot be told so again
                limit.reschedule(0.0)

    async def left(self) -> bool:
        if self._computed is None:  # what is under way nevertheless was let go
            try:
                await asyncio.wait_for(self._idle.wait(), _LEAVES)
            except TimeoutError:
                return False
        return True

    async def begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            for key in reversed(list(self.kept)):
                found = self.kept.get(key)
                if found is None:
                    continue  # it was let go meanwhile
                left = found[0] - self._model.metrics.clock.now()
                if left <= 0:
                    self._drop(key)
                elif not await self._look_after(key, found[1], left):
                    break

    async def _look_after(self, key: _Warm, scheduling: Scheduling, left: float) -> bool:
        """Whether there are nodes that had time for it; else all wait for the next look."""
        try:
            async with asyncio.timeout(SECONDS) as limit:
                self._computed = key, limit
                self._idle.clear()
                await compute_ahead(self._model, scheduling, array("i", key[1]), left)
        except TimeoutError:
            return self._computed is None  # then it was let go
        except UnavailableError:
            return False  # the model sleeps, or has too few nodes
        except AfserveError as error:
            log.info("a warm prompt of %s is not looked after: %s", self._model.model_name, error.message)
        finally:
            self._computed = None
            self._idle.set()
        return True

    async def end(self) -> None:
        """The gateway stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _owner(scheduling: Scheduling) -> str:
    return Tenant(scheduling.tenant).owner
