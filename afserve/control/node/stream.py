"""A node's end of a stream: a reader thread hands on what arrives, `send` never blocks.

`ControlStream` is the one to the controller. Its inbox takes what other threads deliver as well, so that a node waits
in one place. When its connection breaks, it dials again for as long as the run's `orphan_grace` says: the node goes on
meanwhile, and a new stream begins with what the node is. When that is in vain, or the controller has ended the stream,
`receive` says so by raising.
"""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc

from afserve.control.membership.silence import SilenceRules, stretch
from afserve.control.node.account import NodeAccount
from afserve.control.pressure import cpu_pressure
from afserve.control.wire import channel, messages
from afserve.control.wire.placements import SaidLast
from afserve.control.wire.request_values import FromAttention, ToAttention
from afserve.control.wire.values import FromNode, Progress, ToNode
from afserve.errors import AuthError, DeadlineError, PeerLost, RendezvousError
from afserve.tls import Certificates, CertifiedRole, probe

CONTROLLER = "controller"
CONNECT_SECONDS = 20.0
_GRACE_TIMES = 4.0  # at most as long as `orphan_grace`
_BREATH = 0.02  # seconds from the end of a connection to the next attempt


class Sleeps(Protocol):
    """Where a node sleeps that has to wake for more than its inbox."""

    def sleep(self, seconds: float) -> None:
        """Until a `ring`, or until something else is there, or for so long."""

    def ring(self) -> None:
        """By any thread: who sleeps wakes, who does not will not."""


Sent = TypeVar("Sent")
Received = TypeVar("Received")


@dataclass(frozen=True, slots=True)
class Wire(Generic[Sent, Received]):
    """One of the control plane's methods, as the end that calls it sees it."""

    method: str
    receive: str
    encode: Callable[[Sent], bytes]
    decoder: Callable[[], Callable[[bytes], Received]]  # one for each stream


JOIN: Wire[FromNode, ToNode] = Wire(
    channel.METHOD,
    "to_node",
    messages.encode_from_node,
    lambda: partial(messages.decode_to_node, last=SaidLast()),
)
ATTEND: Wire[FromAttention, ToAttention] = Wire(
    channel.ATTEND_METHOD, "to_node", messages.encode_from_attention, lambda: messages.decode_to_attention
)


class Stream(Generic[Sent, Received]):
    """`on_value` and `on_end` are called by the stream's own thread; `on_end` once, whatever happens."""

    def __init__(
        self,
        address: str,
        token: str,
        wire: Wire[Sent, Received],
        on_value: Callable[[Received], None],
        on_end: Callable[[grpc.RpcError | None], None],
        certificates: Certificates | None = None,
        role: CertifiedRole = CertifiedRole.CONTROLLER,
    ) -> None:
        """With `certificates` it is encrypted, and whoever answers has to have one for `role`."""
        self._wire, self._on_value, self._on_end = wire, on_value, on_end
        self._metadata = ((channel.TOKEN_KEY, f"Bearer {token}"),)
        self._outbox: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._channel = channel.dial(address, wire.receive, certificates, role)
        self._call: Any = None
        self._reader = threading.Thread(target=self._read, name="control-reader", daemon=True)

    def wait_open(self, seconds: float) -> bool:
        """Whether anybody answers there in time."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def start(self) -> None:
        """Does not wait for the connection; what is sent meanwhile goes out when it stands."""
        self._call = self._channel.stream_stream(
            self._wire.method,
            request_serializer=self._wire.encode,
            response_deserializer=self._wire.decoder(),
        )(self._outgoing(), metadata=self._metadata)
        self._reader.start()

    def send(self, value: Sent) -> None:
        self._outbox.put(value)

    def close(self) -> None:
        """Let what was sent go out, then end the stream."""
        self._outbox.put(None)
        if self._reader.ident is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=2.0)
        self._channel.close()

    def drop(self) -> None:
        """End the stream at once, whatever was sent."""
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
        self._channel.close()

    def _outgoing(self) -> Iterator[Sent]:
        while (value := self._outbox.get()) is not None:
            yield value

    def _read(self) -> None:
        assert self._call is not None
        try:
            for value in self._call:
                self._on_value(value)
            self._on_end(None)
        except grpc.RpcError as error:
            self._on_end(error)
        finally:
            self._outbox.put(None)


class ControlStream:
    """`with ControlStream(address, token) as stream:` connects, registers nothing, and closes on the way out."""

    def __init__(self, address: str, token: str, certificates: Certificates | None = None) -> None:
        self.address = address
        self.token = token
        self.certificates = certificates
        self.on_break: Callable[[], None] = lambda: (
            None
        )  # by another thread, when the node begins to dial again
        self._account = NodeAccount()
        self._inbox: deque[Any] = deque()
        self._changed = threading.Condition()
        self._sleeps: Sleeps | None = None
        self._asleep = False  # there
        self._ended: Exception | None = None
        self._stream: Stream[FromNode, ToNode] | None = None
        self._closed = threading.Event()

    def __enter__(self) -> "ControlStream":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Raises DeadlineError when no controller answers there, AuthError where a certificate is refused."""
        if self.certificates is not None:
            probe(self.address, self.certificates, CertifiedRole.CONTROLLER)
        stream = self._new()
        if not stream.wait_open(CONNECT_SECONDS):
            stream.close()
            raise DeadlineError(
                f"no controller at {self.address} after {CONNECT_SECONDS:.0f} s; is `afserve up` running there, "
                f"{'with' if self.certificates else 'without'} --certs?"
            )
        self._stream = stream
        stream.start()

    def close(self) -> None:
        """Let what was sent go out, then end the stream."""
        self._closed.set()
        with self._changed:
            stream = self._stream
        if stream is not None:
            stream.close()

    def _new(self) -> "Stream[FromNode, ToNode]":
        return Stream(self.address, self.token, JOIN, self._arrived, self._over, self.certificates)

    def own_address(self) -> str:
        """Of this host, where the controller's host can reach it. Nothing is sent to find out."""
        host, _, port = self.address.rpartition(":")
        where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(where[0], socket.SOCK_DGRAM) as probe:
            probe.connect(where[4])
            return str(probe.getsockname()[0])

    def send(self, value: FromNode) -> None:
        """While there is no connection, nothing: what matters of it is said when there is one again."""
        with self._changed:
            self._account.said(value)
            if self._stream is not None:
                self._stream.send(value)

    def _arrived(self, value: ToNode) -> None:
        with self._changed:
            self._account.told(value)
        self.deliver(value)

    def deliver(self, value: object) -> None:
        """Put something into the inbox, from whatever thread."""
        with self._changed:
            self._inbox.append(value)
            self._wake()

    def sleep_in(self, place: Sleeps) -> None:
        """From now on `receive` waits there: it also returns, with nothing, when that wakes."""
        self._sleeps = place

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._asleep and self._sleeps is not None:
            self._sleeps.ring()

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

    def receive(self, timeout: float) -> list[Any]:
        """What has arrived or was delivered, after waiting at most `timeout` seconds for something.

        Raises when the stream ended.
        """
        if timeout <= 0 and not self._inbox and self._ended is None:
            return []  # what a node that computes finds nearly always, without taking the lock
        if timeout > 0:
            self._wait(timeout)
        with self._changed:
            arrived = list(self._inbox)
            self._inbox.clear()
        if not arrived and self._ended is not None:
            raise self._ended
        return arrived

    def _wait(self, timeout: float) -> None:
        with self._changed:
            if self._inbox or self._ended is not None:
                return
            if self._sleeps is None:
                self._changed.wait(timeout)
                return
            self._asleep = True
        self._sleeps.sleep(timeout)
        self._asleep = False

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

    def _over(self, error: grpc.RpcError | None) -> None:
        """By the stream's own thread. Who was sent away, or let go, does not come back."""
        if error is None:
            self._end(PeerLost(CONTROLLER, "ended the stream"))
            return
        reason = reason_of(error, CONTROLLER)
        with self._changed:
            # A controller takes longer to start where everything waits for a processor.
            grace = self._account.grace * min(_GRACE_TIMES, stretch(0.0, cpu_pressure(), SilenceRules()))
        if isinstance(reason, PeerLost) and grace > 0 and not self._closed.is_set():
            self.on_break()
            threading.Thread(
                target=self._again, args=(reason, grace), name="control-again", daemon=True
            ).start()
        else:
            self._end(reason)

    def _again(self, reason: Exception, grace: float) -> None:
        """Each connection that stands is a beginning: whoever listens there refuses those whom it does not want."""
        self._closed.wait(_BREATH)
        broken, stream = self._stream, self._new()
        assert broken is not None, "it was open once"
        broken.drop()
        stands = stream.wait_open(grace)
        with self._changed:
            if stands and not self._closed.is_set():
                self._stream = stream
                stream.send(self._account.register())
                stream.start()
                return
        stream.drop()
        self._end(reason)

    def _end(self, reason: Exception) -> None:
        with self._changed:
            self._ended = reason
            self._wake()


def reason_of(error: grpc.RpcError, peer: str) -> Exception:
    """Why a stream to `peer` ended."""
    code, details = error.code(), error.details()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AuthError(details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return RendezvousError(details)
    return PeerLost(peer, f"stream broke: {code.name.lower()}: {details}")
