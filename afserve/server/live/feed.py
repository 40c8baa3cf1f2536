"""The events at /live: a frame a second for all who look, made once for all of them, and none while nobody looks.

A frame is the cluster's status with the latencies of the last ten seconds and the requests that run. Who begins to look
is sent the last ten minutes first. Where experts stand goes along when a placement is new to the feed, and every other
second what the nodes do in a moment. A reader who is slow misses frames and never holds the others up.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afserve.errors import AfserveError, OverloadedError
from afserve.metrics import Histogram, quantile
from afserve.placement.placement import Placement
from afserve.server.answers.answering import Watched
from afserve.server.answers.hosted import Hosted
from afserve.server.answers.writer import Writer
from afserve.server.endpoints.info import status_object
from afserve.server.endpoints.service import Service
from afserve.server.http.body import until_gone
from afserve.server.live.history import History, Quantiles
from afserve.server.live.timeline import picture
from afserve.server.replies.wording import encode

log = logging.getLogger("afserve.server")
SECONDS = 1.0
TIMELINE_SECONDS = 2.0
HISTORY_SECONDS = 2.0
WINDOW_SECONDS = 10.0
MOST_RUNNING = 20  # requests that a frame lists
MOST_READERS = 64
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Feeds:
    """One for each model: GET /live?model=NAME, the first one's without."""

    def __init__(self, service: Service) -> None:
        self._models = service.models
        self._feeds = {model.model_name: Feed(service, model) for model in service.models}

    async def show_frames(self, request: Request) -> Response:
        name = request.query_params.get("model")
        model = self._models.first_model if name is None else self._models.named(name)
        if request.method == "HEAD":  # a stream without an end would be one without a beginning
            return Response(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        return await self._feeds[model.model_name].events()

    async def start_feeds(self) -> None:
        """The history is kept from now on, whoever looks."""
        for feed in self._feeds.values():
            feed.start_sampling()

    async def end_feeds(self) -> None:
        for feed in self._feeds.values():
            await feed.end_streams()


class Feed:
    def __init__(self, service: Service, model: Hosted) -> None:
        self._service, self._model = service, model
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._frames = Repeated(SECONDS, self._make, lambda: bool(self._readers))
        self._timelines = Repeated(TIMELINE_SECONDS, self._draw, lambda: bool(self._readers))
        self._history, self._samples = History(), Repeated(HISTORY_SECONDS, self._sample, lambda: True)
        self._recent = {
            "first_token": Recent(model.metrics.first_token),
            "inter_token": Recent(model.metrics.inter_token),
        }
        self._epoch: int | None = None
        self._holders = b""
        self._timeline = b""

    async def events(self) -> Response:
        """Raises OverloadedError where too many look already."""
        if len(self._readers) >= MOST_READERS:
            raise OverloadedError(f"{MOST_READERS} readers look at /live already, the most that it serves")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._readers.add(queue)  # before the answer begins, so that those who come at once are counted
        return _Stream(self, queue, self._service.settings.write_deadline)

    def start_sampling(self) -> None:
        self._samples.start_repeating()

    async def end_streams(self) -> None:
        """The server stops: every reader is told the end."""
        self._samples.stop_repeating()
        self._frames.stop_repeating()
        self._timelines.stop_repeating()
        for reader in list(self._readers):
            _put(reader, None)

    def forget_reader(self, queue: "asyncio.Queue[bytes | None]") -> None:
        self._readers.discard(queue)

    async def write_frames(self, queue: "asyncio.Queue[bytes | None]", writer: Writer) -> None:
        """Until the client has gone or the server stops."""
        if self._frames.start_repeating():
            self._epoch = None
        if self._timelines.start_repeating():
            self._timeline = b""
        placed = drawn = b""
        await writer.write_part(_event("history", encode(self._history.columns()).encode()))
        while (frame := await queue.get()) is not None:
            if self._holders != placed:
                placed = self._holders
                await writer.write_part(_event("placement", placed))
            await writer.write_part(_event("frame", frame))
            if self._timeline != drawn:
                drawn = self._timeline
                await writer.write_part(_event("timeline", drawn))

    async def _make(self) -> None:
        frame = await self._frame()
        for reader in self._readers:
            _put(reader, frame)

    async def _draw(self) -> None:
        recordings = await self._model.backend.recordings()
        drawn = await asyncio.to_thread(picture, recordings)
        self._timeline = encode({"at": time.time(), **drawn}).encode()

    async def _sample(self) -> None:
        view = await self._model.backend.view()
        keys = self._model.metrics.keys.figures()
        self._history.add_sample(time.time(), view.nodes, self._latency(), keys)

    def _latency(self) -> dict[str, Quantiles]:
        now = time.monotonic()
        return {name: recent.read_quantiles(now) for name, recent in self._recent.items()}

    async def _frame(self) -> bytes:
        status = await status_object(self._service, self._model)
        if status["epoch"] != self._epoch:
            text = await self._model.backend.placement()
            self._holders = await asyncio.to_thread(_holders, text)
            self._epoch = int(str(status["epoch"]))
        service, names = self._service, self._model.backend.model.names
        frame = {
            "at": time.time(),
            "latency": self._latency(),
            "last": {name: recent.last for name, recent in self._recent.items()},
            "in_flight": len(service.answering),
            "responses": service.http.by_class(),
            "running": [_running(one) for one in service.answering.longest(names, MOST_RUNNING)],
            "status": status,
        }
        return encode(frame).encode()


class Repeated:
    """Something that is made every few seconds while it is wanted. What fails is made again all the same."""

    def __init__(
        self, seconds: float, make: Callable[[], Awaitable[None]], wanted: Callable[[], bool]
    ) -> None:
        self._seconds, self._make, self._wanted = seconds, make, wanted
        self._task: asyncio.Task[None] | None = None

    def start_repeating(self) -> bool:
        """False where it goes on already. It begins when the caller waits for something."""
        if self._task is not None and not self._task.done():
            return False
        self._task = asyncio.create_task(self._run())
        return True

    def stop_repeating(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._wanted():
            began = time.monotonic()
            try:
                await self._make()
            except AfserveError as error:
                log.debug("no frame for /live: %s", error.message)  # the controller is away; it will be back
            except Exception:
                log.exception("no frame for /live: a bug, see below; the next one is made all the same")
            await asyncio.sleep(max(0.1, self._seconds - (time.monotonic() - began)))


class Recent:
    """What a histogram has counted in the last WINDOW_SECONDS; `last` is the newest answer that was not None."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._seen: deque[tuple[float, Sequence[int]]] = deque()
        self.last: Quantiles = None

    def read_quantiles(self, now: float) -> Quantiles:
        """Quantiles in seconds; None where nothing was counted. `now` never goes back."""
        counts = self._histogram.bucket_counts
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()
        before = self._seen[0][1] if self._seen else (0,) * len(counts)
        self._seen.append((now, counts))
        new = [now - then for now, then in zip(counts, before, strict=True)]
        if not any(new):
            return None
        self.last = {name: quantile(self._histogram.bounds, new, share) for name, share in QUANTILES.items()}
        return self.last


class _Stream(Response):
    def __init__(self, feed: Feed, queue: "asyncio.Queue[bytes | None]", deadline: float) -> None:
        super().__init__()
        self._feed, self._queue, self._deadline = feed, queue, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send, self._deadline)
        try:
            await until_gone(receive, self._feed.write_frames(self._queue, writer))
            await writer.end_response(b"")
        finally:
            self._feed.forget_reader(self._queue)
            writer.stop_timers()


def _running(one: Watched) -> dict[str, object]:
    """`key` is the name of its client's key, empty where none is asked for."""
    return {
        "id": one.id,
        "key": one.owner,
        "created": one.created,
        "tokens": sum(one.tokens),
        "choices": len(one.tokens),
        "stream": one.stream,
    }


def _put(queue: "asyncio.Queue[bytes | None]", item: bytes | None) -> None:
    """The newest counts."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _holders(text: str) -> bytes:
    """Of each layer and expert, the expert nodes that hold it."""
    placement = Placement.from_json(text)
    layers: list[list[list[int]]] = []
    for layer in placement.layers:
        held: list[list[int]] = [[] for _ in range(placement.experts)]
        for node, experts in enumerate(layer.slots):
            for expert in experts:
                if expert >= 0 and node not in held[expert]:
                    held[expert].append(node)
        layers.append(held)
    return encode({"epoch": placement.epoch, "holders": layers}).encode()
