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
from afserve.engine.kv.events import CacheEvent, CacheEvents
from afserve.kv_events_config import EventEndpoint, KvEventsConfig

log = logging.getLogger("afserve.kv_events")
END = (-1).to_bytes(8, "big", signed=True)
_TURN = 0.05  # seconds between two looks at the replay socket
_RETRY = 1.0  # seconds until a port that is taken is tried again
_CLOSE = 5.0
_ASKERS = 64  # answers that may wait for one who asked and does not read


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
        self._sent = 0
        self._closing = threading.Event()
        self._advice = Adviser("KV events")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish_news(self) -> None:
        self._advice.ask(self._clock.now(), self._queue_news, None)

    def _queue_news(self) -> None:
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
        with zmq.Context() as context:
            context.linger = 0
            while not self._closing.is_set():
                try:
                    self._serve(context)
                except zmq.ZMQError as error:
                    log.warning("KV events: %s; tried again in %g s, serving goes on", error, _RETRY)
                    self._closing.wait(_RETRY)

    def _serve(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        with context.socket(zmq.PUB) as news, context.socket(zmq.ROUTER) as replay:
            news.sndhwm = self._config.hwm
            replay.sndhwm = self._config.buffer_steps + _ASKERS
            _open(news, self._config.endpoint, self._node)
            if self._config.replay is not None:
                _open(replay, self._config.replay, self._node)
            while not self._closing.is_set():
                if self._config.replay is not None and replay.poll(0):
                    self._answer(replay)
                try:
                    self._send(news, self._queue.get(timeout=_TURN))
                except queue.Empty:
                    continue

    def _send(self, news: "zmq.Socket[bytes]", events: Sequence[CacheEvent]) -> None:
        batch = self._words.batch(time.time(), events)
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        self._kept.append((number, batch))
        news.send_multipart((self._config.topic.encode(), number, batch))

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
    try:
        socket.bind(place) if endpoint.binds else socket.connect(place)
    except zmq.ZMQError as error:
        raise zmq.ZMQError(error.errno, f"{place}: {error}") from error
