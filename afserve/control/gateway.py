"""A gateway's side of the streams that attention nodes open to it: requests go out, tokens come back.

It owns its clients' requests and knows which attention nodes are there. Which should be, and why one is not, is the
controller's business: a node whose stream broke has a moment to come back, or to be declared lost with a better reason.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from afserve.control.requests import Requests
from afserve.control.wire import channel, messages
from afserve.control.wire.values import Acknowledge, Attend, Refused, ToAttention, Tokens
from afserve.errors import PeerLost, ProtocolError
from afserve.member import attention_node

LOST_SECONDS = 5.0  # longer than the controller waits for the reason of a loss


@dataclass(slots=True)
class _Attending:
    generation: int
    outbox: "asyncio.Queue[bytes]" = field(default_factory=asyncio.Queue)


class Gateway:
    """`handler` is added to a gRPC server: the controller's own, or one of this gateway's process."""

    def __init__(self, token: str, index: int = 0) -> None:
        self.requests = Requests(index)
        self._token = token
        self._nodes: dict[int, _Attending] = {}
        self._changed = asyncio.Condition()
        self._losing: set[asyncio.Task[None]] = set()

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(self._attended)
        return grpc.method_handlers_generic_handler(channel.GATEWAY, {channel.ATTEND: method})

    def is_here(self, node: int) -> bool:
        return node in self._nodes

    def is_attended(self, nodes: int) -> bool:
        """Whether attention nodes 0 to `nodes` - 1 are there."""
        return all(index in self._nodes for index in range(nodes))

    async def wait_attended(self, nodes: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_attended(nodes))

    def send(self, node: int, value: ToAttention) -> None:
        """To a node that is not there, nothing: its requests are answered when it is declared lost."""
        if (found := self._nodes.get(node)) is not None:
            found.outbox.put_nowait(messages.encode_to_attention(value))

    def stop(self) -> None:
        for task in self._losing:
            task.cancel()

    async def _attended(self, requests: AsyncIterator[bytes], context: channel.Context) -> None:
        await channel.authenticate(context, self._token)
        attend = await self._first(requests, context)
        attending = await self._enter(attend, context)
        writer = asyncio.create_task(channel.write(attending.outbox, context))
        reason = "its stream to the gateway ended"
        try:
            async for data in requests:
                self._hear(attending, messages.decode_from_attention(data))
        except ProtocolError as error:
            reason = error.message
        finally:
            writer.cancel()
            await self._leave(attend.index, attending, reason)

    async def _first(self, requests: AsyncIterator[bytes], context: channel.Context) -> Attend:
        try:
            first = messages.decode_from_attention(await anext(requests))
            if isinstance(first, Attend):
                return first
            raise ProtocolError(f"an attention node says first who it is; got {type(first).__name__}")
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise

    async def _enter(self, attend: Attend, context: channel.Context) -> _Attending:
        """A later life takes the place of an earlier one, never the other way round."""
        known = self._nodes.get(attend.index)
        if known is not None and known.generation > attend.generation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{attention_node(attend.index)} has a newer life ({known.generation}) than yours "
                f"({attend.generation})",
            )
        attending = _Attending(attend.generation)
        async with self._changed:
            self._nodes[attend.index] = attending
            self._changed.notify_all()
        self._lose(attend.index, "its stream to the gateway broke, and it came back without its requests")
        return attending

    async def _leave(self, node: int, attending: _Attending, reason: str) -> None:
        if self._nodes.get(node) is not attending:
            return
        async with self._changed:
            del self._nodes[node]
            self._changed.notify_all()
        task = asyncio.create_task(self._lose_soon(node, reason))
        self._losing.add(task)
        task.add_done_callback(self._losing.discard)

    async def _lose_soon(self, node: int, reason: str) -> None:
        await asyncio.sleep(LOST_SECONDS)
        if node not in self._nodes:  # or what is there now is another stream's
            self._lose(node, reason)

    def _lose(self, node: int, reason: str) -> None:
        """Whatever was on this node has been cancelled there."""
        self.requests.fail(PeerLost(attention_node(node), reason), node)

    def _hear(self, attending: _Attending, value: object) -> None:
        match value:
            case Tokens(events):
                ended = self.requests.deliver(events)
            case Refused(number, error):
                self.requests.refuse(number, error)
                ended = (number,)
            case _:
                raise ProtocolError(f"an attention node does not say {type(value).__name__} to a gateway")
        if ended:
            attending.outbox.put_nowait(messages.encode_to_attention(Acknowledge(ended)))
