"""The control streams of a run's nodes: who may open one, values to bytes and back, and how one ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import grpc.aio

from afserve.control.membership.events import Event, Joined, Left, Rejoined, Withdrawn
from afserve.control.wire import channel, messages
from afserve.control.wire.placements import SaidLast
from afserve.control.wire.values import FromNode, Register, Shutdown, ToNode
from afserve.errors import AfserveError, ConfigError, ProtocolError, RendezvousError
from afserve.member import Life
from afserve.tls import Certificates, CertifiedRole

log = logging.getLogger("afserve.control")
_GRACE = 1.0  # seconds that a stop gives to what is on its way


@dataclass(slots=True)
class _Stream:
    """One node's connection. `admitted` is answered once, `dismissed` at most once."""

    number: int
    last: SaidLast = field(default_factory=SaidLast)
    outbox: "asyncio.Queue[bytes]" = field(default_factory=asyncio.Queue)
    admitted: "asyncio.Future[Life]" = field(default_factory=asyncio.Future)
    dismissed: "asyncio.Future[AfserveError]" = field(default_factory=asyncio.Future)

    def put(self, value: ToNode) -> None:
        """Encoded here, so that what cannot be encoded fails its sender and not the stream."""
        self.outbox.put_nowait(messages.encode_to_node(value, self.last))


class NodeStreams:
    """A node that registers becomes an event, `on`, of a connection with a number; `admit` or `refuse` answers it. What
    an admitted node says goes to `hear`, and its end is an event again. `check` raises why no more nodes are taken."""

    def __init__(
        self,
        token: str,
        check: Callable[[], None],
        on: Callable[[Event], None],
        hear: Callable[[Life, FromNode], None],
    ) -> None:
        self._token = token
        self._check, self._on, self._hear = check, on, hear
        self._numbers = count()
        self._joining: dict[int, _Stream] = {}
        self._admitted: dict[Life, _Stream] = {}
        self._server: grpc.aio.Server | None = None

    async def listen(
        self,
        host: str,
        port: int,
        also: Sequence[grpc.GenericRpcHandler],
        *,
        shares_port: bool,
        certificates: Certificates | None,
    ) -> str:
        """Listen, and return the address that nodes join. Raises ConfigError where the port cannot be had.

        `also` are services of this process that are reached at the same address, such as a gateway's. `shares_port`
        where somebody keeps the port for the next controller of this run. With `certificates` only nodes that have one
        of the same authority, for their role, may join.
        """
        options = channel.options(receive="from_node", shares_port=shares_port)
        self._server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(channel.SERVICE, {channel.JOIN: handler}), *also)
        )
        where = f"[{host}]" if ":" in host else host
        try:
            bound = channel.listen(self._server, f"{where}:{port}", certificates)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen for nodes on {where}:{port}; is the port taken?") from error
        await self._server.start()
        return f"{where}:{bound}"

    async def stop(self, last: Shutdown) -> None:
        for stream in self._admitted.values():
            stream.put(last)
        await asyncio.sleep(0)  # lets the writers pick the message up before the server closes
        if self._server is not None:
            await self._server.stop(_GRACE)

    def admit(self, connection: int, member: Life) -> None:
        stream = self._admitted[member] = self._joining.pop(connection)
        stream.admitted.set_result(member)

    def refuse(self, connection: int, error: AfserveError) -> None:
        self._joining.pop(connection).admitted.set_exception(error)

    def dismiss(self, member: Life, error: AfserveError) -> None:
        """Its stream ends with this reason, if there is one."""
        if (stream := self._admitted.pop(member, None)) is not None:
            stream.dismissed.set_result(error)

    def tell(self, member: Life, value: ToNode) -> None:
        """Nothing where its stream has ended."""
        if (stream := self._admitted.get(member)) is not None:
            stream.put(value)

    # ---- one stream

    async def _join(self, requests: AsyncIterator[bytes], context: channel.Context) -> None:
        await channel.authenticate(context, self._token)
        stream = _Stream(next(self._numbers))
        member = await self._register(stream, requests, context)
        writing = asyncio.create_task(channel.write(stream.outbox, context))
        reading = asyncio.create_task(self._read(member, requests))
        reason = "its control stream broke"
        either: set[asyncio.Future[Any]] = {reading, stream.dismissed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if stream.dismissed.done():
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, stream.dismissed.result().message)
            reason = reading.result()
        finally:
            writing.cancel()
            reading.cancel()
            self._admitted.pop(member, None)
            self._on(Left(member, reason))

    async def _register(
        self, stream: _Stream, requests: AsyncIterator[bytes], context: channel.Context
    ) -> Life:
        """Whoever does not say first who it is belongs to nobody."""
        try:
            first = messages.decode_from_node(await anext(requests))
            if not isinstance(first, Register):
                raise RendezvousError(f"a node registers first; got {type(first).__name__}")
            if first.role in tuple(CertifiedRole):
                await channel.certify(context, CertifiedRole(first.role))
            self._check()
            self._joining[stream.number] = stream
            back = first.standing is not None
            self._on(Rejoined(stream.number, first) if back else Joined(stream.number, first))
            return await stream.admitted
        except AfserveError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as bug:  # the node would join again for ever, and fail in the same way
            log.exception("a node that registered was not taken")
            why = (
                f"{type(bug).__name__}: {bug}; this is a fault of afserve, and the controller's log has more"
            )
            if stream.admitted.done() and not stream.admitted.exception():
                self._admitted.pop(stream.admitted.result(), None)
                self._on(Left(stream.admitted.result(), why))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"the node was not taken: {why}")
            raise
        finally:
            if self._joining.pop(stream.number, None) is not None:
                self._on(Withdrawn(stream.number))

    async def _read(self, member: Life, requests: AsyncIterator[bytes]) -> str:
        """Until the stream ends; why it did."""
        try:
            async for data in requests:
                self._hear(member, messages.decode_from_node(data))
        except ProtocolError as error:
            return error.message
        except grpc.RpcError:
            return "its control stream broke"
        return "its control stream ended"
