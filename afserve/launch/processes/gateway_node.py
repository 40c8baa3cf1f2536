"""A gateway as a process of its own: HTTP on one side, streams of attention nodes and the controller's on the other.

Several gateways of a host accept on one listening socket that whoever started them holds. A gateway refuses, drains and
stops as the one process of `afserve up` does; what ended the run reaches its clients in their last event.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path

import grpc.aio

from afserve.adviser import Adviser
from afserve.control.backend import ServedModel
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.homes import home_rules
from afserve.control.identifying import reading
from afserve.control.node import worker
from afserve.control.node.heartbeat import HeartbeatThread
from afserve.control.node.stream import ControlStream
from afserve.control.node.tracing import sent
from afserve.control.queries import DistantQueries
from afserve.control.wire import channel
from afserve.control.wire.load_values import GatewayLoad
from afserve.control.wire.values import (
    Assigned,
    AttentionNodes,
    Drain,
    Drained,
    Endpoint,
    Identity,
    QueryAnswer,
    Ready,
    Serve,
    Shutdown,
)
from afserve.engine.scheduling.routed_experts import row_bytes_of
from afserve.errors import AfserveError
from afserve.families.table import load_spec
from afserve.launch.processes.gateway_options import GatewayOptions, options_of
from afserve.launch.processes.http import settings_for
from afserve.logs import configure
from afserve.member import Role
from afserve.server.app import build_app
from afserve.server.endpoints.service import Service
from afserve.server.http.settings import Listening, ServerSettings
from afserve.server.serve import bind, serve
from afserve.tokens.tokenizer import Tokenizer
from afserve.tracing.trace import Trace

log = logging.getLogger("afserve.gateway")
_RECEIVE_SECONDS = 0.5
_LOAD_SECONDS = 1.0  # between two messages about what is asked here


def gateway_role(
    options: GatewayOptions, sock: socket.socket, *, leaves_by_itself: bool = False, shared: bool = True
) -> worker.Serve:
    """What `run_node` runs for a gateway that accepts on `sock`, as others do where it is `shared`.

    One that `leaves_by_itself` drains on SIGTERM and goes; others are told by the controller.
    """

    def run(stream: ControlStream, assigned: Assigned, heartbeat: HeartbeatThread) -> None:
        node = _GatewayNode(options, sock, shared, stream, assigned, heartbeat)
        asyncio.run(node.run(leaves_by_itself))

    return run


def joining(asked: Listening, limits: ServerSettings) -> worker.Serve:
    """What `run_node` runs for a gateway that was started by hand: it listens on an address of its own."""
    configure(limits.log_level, limits.log_format)
    settings = settings_for(asked, limits)
    sock = bind(asked.host, asked.port)

    def run(stream: ControlStream, assigned: Assigned, heartbeat: HeartbeatThread) -> None:
        source = assigned.deployment.source
        options = options_of(asked.names(source.name), source.path, settings)
        host, port = sock.getsockname()[:2]
        scheme = "https" if settings.certfile else "http"
        log.warning("gateway %d serves on %s://%s:%d", assigned.node.index, scheme, host, port)
        gateway_role(options, sock, leaves_by_itself=True, shared=False)(stream, assigned, heartbeat)

    return run


class _GatewayNode:
    def __init__(
        self,
        options: GatewayOptions,
        sock: socket.socket,
        shared: bool,
        stream: ControlStream,
        assigned: Assigned,
        heartbeat: HeartbeatThread,
    ) -> None:
        self._options, self._sock, self._stream, self._assigned = options, sock, stream, assigned
        self._heartbeat = heartbeat
        self._shared = shared
        self._told, self._late = asyncio.Event(), False  # `late`: the run served before it came
        self._stop, self._leave = asyncio.Event(), asyncio.Event()
        self._released = asyncio.Event()

    async def run(self, leaves_by_itself: bool = False) -> None:
        """Until the controller says stop, or its stream ends. Raises what ended the run."""
        if leaves_by_itself:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
        deployment = self._assigned.deployment
        spec = load_spec(deployment.source.path)
        served = ServedModel(
            self._options.name,
            self._options.tokenizer,
            deployment.engine.max_model_len,
            spec.vocab_size,
            self._options.created,
            self._options.aliases,
            deployment.engine.drafts().most > 0,
            row_bytes_of(spec),
            deployment.engine.block_size,
        )
        gateway = Gateway(
            self._stream.token,
            home_rules(deployment),
            self._assigned.node.index,
            self._assigned.life.generation,
            report_unheard=self._stream.send,
        )
        queries = DistantQueries(self._stream.send)
        self._tell_broken(queries)
        trace = Trace(str(self._assigned.node)) if deployment.trace_folder else None
        frontend = Frontend(queries, gateway, served, trace)
        tokenizer = Tokenizer.from_folder(self._options.tokenizer)
        app = build_app([(frontend, tokenizer)], self._options.settings)
        service: Service = app.state.service
        server = await self._listen(gateway)
        found = await asyncio.wrap_future(
            reading(deployment.source, (Role.GATEWAY,), full=False, progress=lambda done: None)
        )
        self._stream.send(Identity(found))
        await service.text.start_ahead()
        obeying = asyncio.create_task(self._obey(queries, gateway, service))
        attended = asyncio.create_task(self._when_attended(gateway))
        counting = asyncio.create_task(self._tell_load(service))
        try:
            with sent(trace, self._stream.send, deployment):
                await self._until_wanted(queries)
                await serve(app, self._sock, self._stop, self._leave)
                frontend.close()
                self._stream.send(Drained())
                await self._released.wait()
        finally:
            obeying.cancel()
            attended.cancel()
            counting.cancel()
            gateway.stop()
            await server.stop(0.5)
            if trace is not None and not deployment.trace_sent:
                trace.write(Path(deployment.trace_folder) / f"{trace.process}.trace")
        queries.check()

    def _end(self) -> None:
        """It takes nothing new, ends what is open, and goes."""
        self._stop.set()
        self._released.set()

    async def _until_wanted(self, queries: DistantQueries) -> None:
        """Where the run serves already, other gateways or the listening socket take connections until this one can."""
        await self._told.wait()
        if not self._late:
            return
        waits = {asyncio.create_task(waited) for waited in (queries.wait_serving(), self._stop.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _tell_broken(self, queries: DistantQueries) -> None:
        loop = asyncio.get_running_loop()

        def broken() -> None:
            with contextlib.suppress(RuntimeError):  # the gateway has ended meanwhile
                loop.call_soon_threadsafe(queries.broken)

        self._stream.on_break = broken

    async def _when_attended(self, gateway: Gateway) -> None:
        """Ready is who can pass on a request."""
        await gateway.wait_attended()
        self._stream.send(Ready(self._heartbeat.resident_bytes()))

    async def _tell_load(self, service: Service) -> None:
        """Where it has changed, for whoever sizes the pools."""
        said, advice = GatewayLoad(), Adviser("counting the load of this gateway")
        while True:
            await asyncio.sleep(_LOAD_SECONDS)
            load = advice.ask(time.monotonic(), service.models.first_model.metrics.load, said)
            if load != said:
                self._stream.send(load)
                said = load

    async def _listen(self, gateway: Gateway) -> grpc.aio.Server:
        """For attention nodes, at the address by which the controller's host knows this one."""
        server = grpc.aio.server(options=channel.options(receive="from_node"))
        server.add_generic_rpc_handlers((gateway.handler,))
        host = self._stream.own_address()
        where = f"[{host}]" if ":" in host else host
        port = channel.listen(server, f"{where}:0", self._stream.certificates)
        await server.start()
        self._stream.send(Endpoint(f"{where}:{port}", {}))
        return server

    async def _obey(self, queries: DistantQueries, gateway: Gateway, service: Service) -> None:
        try:
            while not self._released.is_set():
                for command in await asyncio.to_thread(self._stream.receive, _RECEIVE_SECONDS):
                    match command:
                        case QueryAnswer():
                            queries.take_answer(command)
                        case AttentionNodes():
                            gateway.update_nodes(command)
                            self._late = self._late or (command.serves and self._shared)
                            self._told.set()
                        case Serve():
                            queries.serve()
                        case Drain(ends):
                            (self._stop if ends else self._leave).set()
                        case Shutdown(error):
                            self._over(queries, gateway, error)
        except AfserveError as error:
            service.answering.insist()
            self._over(queries, gateway, error)

    def _over(self, queries: DistantQueries, gateway: Gateway, error: AfserveError | None) -> None:
        """Open requests are answered with the reason, if there is one; else they had their time to end."""
        queries.end(error)
        if error is not None:
            gateway.fail(error)
        self._stop.set()
        self._released.set()


def inherited(descriptor: int) -> socket.socket:
    """The listening socket that whoever started this process holds."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    os.set_inheritable(descriptor, False)
    return sock
