"""With --warm-ahead: once a chat is answered, what is certain of its next turn is computed while nobody asks; and so
are prompts that were warmed, once more, for as long as they are to stay: nodes may have been restarted meanwhile.

Nodes do that when they have nothing else to do, and leave it at once for whoever asks. What it takes here is time of
a text process, where one is free. A conversation whose next turn is asked meanwhile finds what there is.
"""

import asyncio
import json
import logging
from array import array
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace

from afserve.engine.scheduling.request import AHEAD_PRIORITY, GenerationRequest, SamplingParams, Tenant
from afserve.errors import AfserveError
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.declared import Scheduling
from afserve.server.bodies.prepared import Prepared
from afserve.server.text.kinds import BodyKind
from afserve.server.text.text_pool import TextPool

log = logging.getLogger("afserve.server")
MOST = 64  # conversations at a time; of others nothing is computed
SECONDS = 300.0  # then who was answered is hardly there any more
PAUSE = 30.0  # seconds between two looks after warm prompts
_LOOK = 0.05  # seconds between two looks for a free text process
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
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def answered(self, asked: Prepared, answer: "array[int]", kept: "Future[None] | None") -> None:
        """These token ids are the answer. Once `kept` is done they stand in prompts that follow."""
        if asked.body and asked.scheduling.ahead and asked.params.n == 1 and len(self._tasks) < MOST:
            task = asyncio.get_running_loop().create_task(self._compute(asked, answer, kept))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _compute(self, asked: Prepared, answer: "array[int]", kept: "Future[None] | None") -> None:
        try:
            async with asyncio.timeout(SECONDS):
                if kept is not None:
                    await asyncio.wrap_future(kept)
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
    end of it."""

    def __init__(self, model: Hosted, pause: float = PAUSE) -> None:
        self._model, self._pause = model, pause
        self._until: OrderedDict[tuple[bytes, str], tuple[float, Scheduling]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def warmed(self, asked: Prepared) -> None:
        """These are to stay. Beyond `MOST` the ones warmed first are left to what they are."""
        until = self._model.metrics.clock.now() + asked.scheduling.retain
        for prompt in asked.prompts:
            key = prompt.tobytes(), asked.scheduling.cache_salt
            self._until[key] = until, asked.scheduling
            self._until.move_to_end(key)
            while len(self._until) > MOST:
                self._until.popitem(last=False)

    async def begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            for (tokens, salt), (until, scheduling) in reversed(list(self._until.items())):
                left = until - self._model.metrics.clock.now()
                if left <= 0:
                    self._until.pop((tokens, salt), None)
                    continue
                try:
                    async with asyncio.timeout(SECONDS):
                        await compute_ahead(self._model, scheduling, array("i", tokens), left)
                except TimeoutError:
                    break  # nodes are busy: later
                except AfserveError as error:
                    log.info(
                        "a warm prompt of %s is not looked after: %s", self._model.model_name, error.message
                    )
                    break

    async def end(self) -> None:
        """The gateway stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
