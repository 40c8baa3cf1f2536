"""A gateway's side of the streams that attention nodes open to it: requests go out, tokens come back.

It owns its clients' requests; `homes` decides where each is computed. Which attention nodes there should be is
the controller's business. This file moves bytes and keeps time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio

from afserve.clock import AwakeClock, Clock
from afserve.control.admission import Admission, Objectives
from afserve.control.homes import HomeRules, Homes
from afserve.control.moves import Moves
from afserve.control.questions import Asking
from afserve.control.requests import Request, Requests, Taker
from afserve.control.wire import channel, messages
from afserve.control.wire.cache_values import KeptCache
from afserve.control.wire.keeping import Keep, KeptAnswer
from afserve.control.wire.request_values import Attend, ToAttention
from afserve.control.wire.values import AttentionNodes, Unheard
from afserve.engine.scheduling.request import GenerationRequest
from afserve.errors import AfserveError, ProtocolError, RendezvousError
from afserve.member import Life
from afserve.tls import CertifiedRole

_TICK = 0.05
_LOOK = 0.25  # while nobody waits and no stream is away


class _Attending:
    """One stream."""

    def __init__(self, attend: Attend) -> None:
        self.life = attend.life
        self.number = attend.stream
        self.outbox: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, value: ToAttention) -> None:
        self.outbox.put_nowait(messages.encode_to_attention(value))


class Gateway:
    """`handler` is added to a gRPC server: the controller's own, or one of this gateway's process.

    `generation` says which life of gateway `index` this is.
    """

    def __init__(
        self,
        token: str,
        rules: HomeRules | None = None,
        index: int = 0,
        generation: int = 0,
        clock: Clock | None = None,
        report_unheard: Callable[[Unheard], None] = lambda said: None,
    ) -> None:
        """`report_unheard` is told, while that lasts, of nodes that have requests and say nothing."""
        rules = rules or HomeRules()
        self._report_unheard = report_unheard
        self.requests = Requests(index, generation)
        # A pause of this process makes a node half as late as one that is to be reported.
        self._homes = Homes(self.requests, rules, clock or AwakeClock(rules.silence / 2))
        self._look_seconds = min(_LOOK, rules.silence / 4)
        self._attendance = self._homes.attendance
        self._token = token
        self._complete = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(self._attended)
        return grpc.method_handlers_generic_handler(channel.GATEWAY, {channel.ATTEND: method})

    # ---- requests

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        """Raises OverloadedError where they would be too late for what is asked for."""
        self._homes.admit(prompts, wanted)

    @property
    def admission(self) -> Admission:
        """What is predicted, and who was refused for it."""
        return self._homes.admission

    def open(self, asked: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None) -> Request:
        """It goes to a node at once, or as soon as there is one."""
        request = self._homes.open(asked, keep, taker)
        self._keep_time()
        return request

    def close(self, request: Request) -> None:
        """Cancels it where it has not ended."""
        self._homes.close(request)

    def leave(self, request: Request) -> None:
        """Where it is kept it stays, for another gateway."""
        self._homes.leave(request)

    def halt(self, request: Request) -> None:
        """It needs no more tokens, but is kept."""
        self._homes.halt(request)

    async def find(self, id: str, *, take: bool) -> Asking[KeptAnswer]:
        """What attention nodes keep of a request that any gateway began."""
        return await self._homes.find(id, take=take)

    async def ask_caches(
        self, owner: str | None, *, unpin: bool, prompt: Sequence[int] = (), salt: str = ""
    ) -> Asking[KeptCache]:
        """What attention nodes keep for this owner, for anybody where it is None; with `unpin` no longer."""
        return await self._homes.ask_caches(owner, unpin=unpin, prompt=prompt, salt=salt)

    def adopt(self, home: Life, kept: KeptAnswer, asked: GenerationRequest) -> Request:
        """Goes on with what was taken from another gateway."""
        request = self._homes.adopt(home, kept, asked)
        self._keep_time()
        return request

    def fail(self, error: AfserveError) -> None:
        """End every open request with this reason."""
        self.requests.fail(error)

    @property
    def moves(self) -> Moves:
        """Requests that went on at another node."""
        return self._homes.moves

    # ---- nodes

    @property
    def refusing(self) -> str:
        """Why new requests are refused; empty where they are not."""
        return self._attendance.refusing

    @property
    def attended(self) -> bool:
        """Whether any node may be given a request."""
        return bool(self._attendance.usable())

    def unattended(self) -> list[int]:
        """Attention nodes that the controller named and that have no stream to this gateway."""
        return self._attendance.unattended()

    async def wait_attended(self) -> None:
        """Returns when every attention node that the controller named, and at least one, has opened its stream."""
        await self._complete.wait()

    def update_nodes(self, value: AttentionNodes) -> None:
        """By the controller: who attends from now on."""
        self._homes.update_nodes(value)
        self._look()

    def stop(self) -> None:
        """Nothing is moved any more."""
        self._stopped = True
        self._stop_time()

    # ---- one stream

    async def _attended(self, requests: AsyncIterator[bytes], context: channel.Context) -> None:
        await channel.authenticate(context, self._token)
        await channel.certify(context, CertifiedRole.ATTENTION)
        attending = await self._enter(requests, context)
        writer = asyncio.create_task(channel.write(attending.outbox, context))
        try:
            async for data in requests:
                self._homes.heard(attending, messages.decode_from_attention(data))
                self._keep_time()
                if not self._attendance.is_present(attending):
                    return
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        finally:
            writer.cancel()
            self._homes.left(attending)
            self._look()

    async def _enter(self, requests: AsyncIterator[bytes], context: channel.Context) -> _Attending:
        """Whoever does not say first who it is, or has been succeeded, is not let in."""
        try:
            first = messages.decode_from_attention(await anext(requests))
            if not isinstance(first, Attend):
                raise ProtocolError(f"an attention node says first who it is; got {type(first).__name__}")
            attending = _Attending(first)
            self._homes.entered(attending, first.held)
        except (ProtocolError, RendezvousError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise
        self._look()
        return attending

    def _look(self) -> None:
        """Who attends has changed."""
        if self.attended and not self.unattended():
            self._complete.set()
        else:
            self._complete.clear()
        self._stop_time()  # it may be due sooner now
        self._keep_time()

    # ---- time

    def _keep_time(self) -> None:
        restless = self._homes.restless
        if self._timer is None and (restless or len(self.requests)) and not self._stopped:
            seconds = _TICK if restless else self._look_seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _stop_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._homes.check_time()
        for said in self._homes.unheard():
            self._report_unheard(said)
        self._keep_time()
