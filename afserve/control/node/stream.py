"""A node's end of its one stream to the controller: a reader thread fills an inbox, `send` never blocks.

It knows values, not what they mean. When the stream ends, for whatever reason, `receive` says so by raising.
"""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

import grpc

from afserve.control.wire import channel, messages
from afserve.control.wire.values import FromNode, Progress, ToNode
from afserve.errors import AuthError, DeadlineError, PeerLost, RendezvousError

CONTROLLER = "controller"
CONNECT_SECONDS = 20.0


class ControlStream:
    """`with ControlStream(address, token) as stream:` connects, registers nothing, and closes on the way out."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._metadata = ((channel.TOKEN_KEY, f"Bearer {token}"),)
        self._outbox: queue.SimpleQueue[FromNode | None] = queue.SimpleQueue()
        self._inbox: deque[ToNode] = deque()
        self._changed = threading.Condition()
        self._ended: Exception | None = None
        self._channel: grpc.Channel | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "ControlStream":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Raises DeadlineError when no controller answers there."""
        self._channel = grpc.insecure_channel(self._address, options=channel.options(receive="to_node"))
        try:
            grpc.channel_ready_future(self._channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError as error:
            self._channel.close()
            raise DeadlineError(
                f"no controller at {self._address} after {CONNECT_SECONDS:.0f} s; is `afserve up` running there?"
            ) from error
        call = self._channel.stream_stream(
            channel.METHOD,
            request_serializer=messages.encode_from_node,
            response_deserializer=messages.decode_to_node,
        )(self._outgoing(), metadata=self._metadata)
        self._reader = threading.Thread(target=self._read, args=(call,), name="control-reader", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Let what was sent go out, then end the stream."""
        self._outbox.put(None)
        if self._reader is not None:
            self._reader.join(timeout=2.0)
        if self._channel is not None:
            self._channel.close()

    def own_address(self) -> str:
        """Of this host, where the controller's host can reach it. Nothing is sent to find out."""
        host, _, port = self._address.rpartition(":")
        where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(where[0], socket.SOCK_DGRAM) as probe:
            probe.connect(where[4])
            return str(probe.getsockname()[0])

    def send(self, value: FromNode) -> None:
        self._outbox.put(value)

    def progress(self, what: str) -> Callable[[float], None]:
        """A callback for loaders; whole percents are sent, each once. Raises when the stream ended: nobody waits."""
        last = -1

        def report(fraction: float) -> None:
            nonlocal last
            if self._ended is not None:
                raise self._ended
            percent = int(fraction * 100)
            if percent != last:
                last = percent
                self.send(Progress(fraction, what))

        return report

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def receive(self, timeout: float) -> list[ToNode]:
        """What has arrived, after waiting at most `timeout` seconds for something. Raises when the stream ended."""
        with self._changed:
            if not self._inbox and self._ended is None and timeout > 0:
                self._changed.wait(timeout)
            arrived = list(self._inbox)
            self._inbox.clear()
        if not arrived and self._ended is not None:
            raise self._ended
        return arrived

    def expect(self, kind: type[ToNode], deadline: float, what: str) -> ToNode:
        """The next value, which must be a `kind`. Raises DeadlineError naming `what` is missing."""
        until = time.monotonic() + deadline
        while not (arrived := self.receive(max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise DeadlineError(f"{what} did not come from the controller within {deadline:.0f} s")
        with self._changed:
            self._inbox.extendleft(reversed(arrived[1:]))
        if not isinstance(arrived[0], kind):
            raise RendezvousError(f"expected {what} from the controller, got {type(arrived[0]).__name__}")
        return arrived[0]

    def _outgoing(self) -> Iterator[FromNode]:
        while (value := self._outbox.get()) is not None:
            yield value

    def _read(self, call: Iterator[ToNode]) -> None:
        try:
            for value in call:
                with self._changed:
                    self._inbox.append(value)
                    self._changed.notify_all()
            self._end(PeerLost(CONTROLLER, "ended the stream"))
        except grpc.RpcError as error:
            self._end(_reason(error))

    def _end(self, reason: Exception) -> None:
        with self._changed:
            self._ended = reason
            self._changed.notify_all()
        self._outbox.put(None)


def _reason(error: grpc.RpcError) -> Exception:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthError(details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return RendezvousError(details)
    return PeerLost(CONTROLLER, f"stream broke: {code.name.lower()}: {details}")
