"""Sends what a cache tells to receivers over ZeroMQ, as vLLM does, from a thread of its own: a receiver that is slow,
absent or hostile costs serving nothing.

A message has three frames: the topic, its number (8 bytes, big-endian, from 0), a batch in msgpack. Who missed some
asks at the replay endpoint with the first number that is wanted, gets (number, batch) for each that is still kept, and
at the end the number -1.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.control.node.kv_event_words import EventWords
from afserve.engine.kv.events import BlocksCleared, CacheEvent, CacheEvents
from afserve.kv_events_config import EventEndpoint, KvEventsConfig

log = logging.getLogger("afserve.kv_events")
END = (-1).to_bytes(8, "big", signed=True)
_TURN = 0.05  # seconds between two looks at the replay socket
_RETRY = 1.0  # seconds until a port that is taken is tried again
_LONGEST_REST = 30.0  # seconds after faults that nobody expected
_CLOSE = 5.0
_ASKERS = 64  # answers that may wait for one who does not read, and questions that are answered in a turn
_HEARTBEAT = 5_000  # milliseconds between two questions whether a receiver still reads
_DEAF = 15_000  # milliseconds without an answer: what waits for it is let go
_MOST_KEPT = 64 << 20  # bytes of the messages that can be asked for again


class KvEventPublisher:
    """Of the attention node of this index. `publish_news` once per turn of its loop."""

    def __init__(
        self,
        config: KvEventsConfig,
        events: CacheEvents,
        node: int,
        block_size: int,
        clock: Clock | None = None,
    ) -> None:
        self._config, self._events, self._node = config, events, node
        self._clock = clock or MonotonicClock()
        self._words = EventWords(config, node, block_size)
        self._queue: queue.Queue[Sequence[CacheEvent]] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_bytes = self._sent = 0
        self._closing, self._broken = threading.Event(), threading.Event()
        self._skips = False  # until everything is told anew
        self._told = ""
        self._advice = Adviser("KV events")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish_news(self) -> None:
        self._advice.ask(self._clock.now(), self._queue_news, None)

    def _queue_news(self) -> None:
        if self._broken.is_set():
            self._events.begin_anew()
            self._broken.clear()
        if not (news := self._events.take_news()):
            return
        try:
            self._queue.put_nowait(news)
        except queue.Full:
            self._events.begin_anew()

    def stop_publishing(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE)

    def _run(self) -> None:
        advice = Adviser("sending KV events", longest=_LONGEST_REST)
        with zmq.Context() as context:
            context.linger = 0
            while not self._closing.is_set():
                with advice.guarded(self._clock.now()):
                    try:
                        self._serve(context)
                    except zmq.ZMQError as error:
                        self._say_once(f"KV events: {error}; tried again every {_RETRY:g} s, serving goes on")
                        self._closing.wait(_RETRY)
                self._closing.wait(advice.rest_left(self._clock.now()))

    def _say_once(self, words: str) -> None:
        if words != self._told:
            log.warning("%s", words)
        self._told = words

    def _serve(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        with context.socket(zmq.PUB) as news, context.socket(zmq.ROUTER) as replay:
            news.sndhwm = self._config.hwm
            news.immediate = True  # nothing waits for a receiver that was never there
            replay.sndhwm = self._config.buffer_steps + _ASKERS
            _open(news, self._config.endpoint, self._node)
            if self._config.replay is not None:
                _open(replay, self._config.replay, self._node)
            while not self._closing.is_set():
                for _ in range(_ASKERS):
                    if self._config.replay is None or not replay.poll(0):
                        break
                    self._answer(replay)
                try:
                    self._send(news, self._queue.get(timeout=_TURN))
                except queue.Empty:
                    continue

    def _send(self, news: "zmq.Socket[bytes]", events: Sequence[CacheEvent]) -> None:
        if self._skips and not isinstance(events[0], BlocksCleared):
            return  # it follows what nobody was told
        self._skips = True
        try:
            batch = self._words.batch(time.time(), events)
        except Exception:
            self._broken.set()
            raise
        self._skips = False
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        self._keep(number, batch)
        news.send_multipart((self._config.topic.encode(), number, batch))

    def _keep(self, number: bytes, batch: bytes) -> None:
        if len(self._kept) == self._config.buffer_steps:
            self._drop_first()
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while self._kept_bytes > _MOST_KEPT and len(self._kept) > 1:
            self._drop_first()

    def _drop_first(self) -> None:
        self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """A question of another form is passed over: who sent it can be anybody."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        for number, batch in list(self._kept):
            if number >= frames[2]:
                replay.send_multipart((frames[0], b"", number, batch), zmq.NOBLOCK)
        replay.send_multipart((frames[0], b"", END, b""), zmq.NOBLOCK)


def _open(socket: "zmq.Socket[bytes]", endpoint: EventEndpoint, node: int) -> None:
    place = endpoint.of_node(node)
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT, _DEAF
    try:
        socket.bind(place) if endpoint.binds else socket.connect(place)
    except zmq.ZMQError as error:
        raise zmq.ZMQError(error.errno, f"{place}: {error}") from error
