"""The controlling process of `afserve up`: every model's run and the one HTTP server in front of them.

It shows the way from loading to ready, and ends everything on Ctrl-C, SIGTERM or the loss of what cannot be recovered.
Of several models one that cannot go on is started again, and the others go on meanwhile.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from rich.console import Console

from afserve.control.membership.recovery import OnLoss
from afserve.control.wire.load_values import GatewayLoad
from afserve.errors import AfserveError, PeerLost
from afserve.launch.processes.gateway_options import options_of
from afserve.launch.processes.http import Http, HttpHere, HttpInProcesses, serving_in_words
from afserve.launch.processes.supervisor import (
    BEAT_SECONDS,
    FIRST_PAUSE,
    INSISTED,
    PROVEN_SECONDS,
    RESTARTS,
    Term,
)
from afserve.launch.run.banner import StartedModel, banner
from afserve.launch.run.loading import LoadingBars
from afserve.launch.run.local_run import GatewayProcesses, LocalRun, RunOwner
from afserve.launch.run.model_run import ModelRun
from afserve.launch.run.planned_run import PlannedRun
from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer

log = logging.getLogger("afserve.launch")
INSIST_SECONDS = 1.0  # from the second Ctrl-C: for streams to be told


class Serving:
    """`run()` is all of one term."""

    def __init__(
        self,
        planned: Sequence[PlannedRun],
        settings: ServerSettings,
        sock: socket.socket,
        term: Term,
        started: float,
    ) -> None:
        self._settings, self._sock, self._term = settings, sock, term
        self._started = started if not term.number else time.monotonic()
        self._console = Console(stderr=True)
        self._bars = LoadingBars(self._console)
        self._stop = asyncio.Event()
        self._insisted = False
        self._served = term.number > 0  # some time: from then on the models do not end one another
        flags = planned[0].flags
        self._record = flags.run.record_routing
        self._scheme = "https" if settings.certfile else "http"
        self._several = len(planned) > 1
        self._models = [ModelRun(each, term, self._run_of) for each in planned]
        self._http: Http
        if flags.wishes.gateways:
            self._http = HttpInProcesses(
                self._models[0].run.controller, settings.drain_seconds, settings.keys_file
            )
        else:
            tokenizers = [Tokenizer.from_folder(each.found.tokenizer) for each in planned]
            backends = [model.backend for model in self._models]
            self._http = HttpHere(list(zip(backends, tokenizers, strict=True)), settings, sock)

    def _run_of(self, each: PlannedRun, term: Term) -> LocalRun:
        options = options_of(each.names, str(each.found.tokenizer), self._settings)
        return LocalRun(
            each.topology,
            each.found,
            each.names[0],
            each.site,
            each.balance,
            each.assignment,
            GatewayProcesses(options, self._sock) if each.flags.wishes.gateways else None,
            each.flags.wishes.on_loss,
            term,
            each.flags.run.certs,
            each.names[1:],
            self._owner(each.names[0]),
            each.pilot,
        )

    def _owner(self, name: str) -> RunOwner:
        """Bars show a first start only."""
        read_load = partial(self._load_of, name)
        if self._served:
            return RunOwner(end_run=self._end, read_load=read_load)
        name = name if self._several else ""
        return RunOwner(
            show_progress=partial(self._bars.update, model=name),
            show_own_progress=partial(self._bars.verify, model=name),
            end_run=self._end,
            read_load=read_load,
        )

    def _load_of(self, name: str) -> GatewayLoad:
        return self._http.load_of(name)

    async def run(self) -> None:
        if self._record is not None:
            await self._models[0].backend.record_routing(True)
        self._beat()
        asyncio.get_running_loop().add_reader(self._term.reports, self._hear_supervisor)
        gc.freeze()  # full collections walk connections and streams, not what is there from the start
        async with AsyncExitStack() as until_end:
            for model in self._models:
                until_end.push_async_callback(model.stop)
                await model.run.start()
            serving = asyncio.create_task(self._http.run(self._stop))
            try:
                await self._until_over()
            finally:
                self._stop.set()
                await serving
                if self._insisted:
                    self._end_at_once()
                await self._save_recording()
        for model in self._models:
            await model.planned.site.dismiss()
        if self._insisted:
            self._end_at_once()

    async def _until_over(self) -> None:
        """Until the user or a failure ends it. Raises the failure."""
        ending = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._show_start())
        failing = asyncio.create_task(self._until_failed())
        template = asyncio.create_task(self._http.check())
        try:
            await asyncio.wait({ending, failing, template}, return_when=asyncio.FIRST_COMPLETED)
            if template.done():
                template.result()
            await asyncio.wait({ending, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
        finally:
            for task in (ending, failing, starting, template):
                task.cancel()
            await asyncio.gather(starting, failing, return_exceptions=True)

    async def _until_failed(self) -> None:
        """Raises what ended the only model, the last of several, or any of them before all have served."""
        keeping = [asyncio.create_task(self._keep(model)) for model in self._models]
        try:
            raise (await asyncio.gather(*keeping))[-1]
        finally:
            for task in keeping:
                task.cancel()

    async def _keep(self, model: ModelRun) -> AfserveError:
        """Returns why one of several is served no more. Raises it where nothing else goes on."""
        tries = 0
        while True:
            began = time.monotonic()
            failure = await model.until_over()
            if failure is None:
                if (hindrance := await self._sleep(model)) is not None:
                    return hindrance
                continue
            error = self._explained(model, failure)
            if len(self._models) == 1 or not self._served:
                raise error
            tries = 1 if time.monotonic() - began > PROVEN_SECONDS else tries + 1
            if tries > RESTARTS or model.planned.flags.wishes.on_loss != OnLoss.RECOVER:
                log.error("%s; the other models go on, this one's requests are refused", error.message)
                await model.run.stop()
                return error
            log.error("%s; it is started again, the other models go on", error.message)
            await asyncio.sleep(FIRST_PAUSE * 2.0 ** (tries - 1))
            try:
                await model.again()
            except AfserveError as hindrance:
                log.error("%s: cannot be started again: %s", model.name, hindrance.message)
                return hindrance

    async def _sleep(self, model: ModelRun) -> AfserveError | None:
        """Until somebody asks for it. Returns why it is served no more."""
        if not (model.may_sleep and self._served):
            return None
        log.warning("%s: nobody asks for it; its nodes end until somebody does", model.name)
        try:
            await model.sleep_until_asked()
        except AfserveError as error:
            log.error("%s: cannot be started again: %s", model.name, error.message)
            return error
        log.warning("%s: somebody asked for it, and it serves again", model.name)
        return None

    def _explained(self, model: ModelRun, error: AfserveError) -> AfserveError:
        """Which model's it is, where there are several."""
        error = model.run.explained(error)
        if len(self._models) == 1:
            return error
        if isinstance(error, PeerLost):
            return PeerLost(f"{model.name}: {error.peer}", error.reason)
        return type(error)(f"{model.name}: {error.message}")

    async def _save_recording(self) -> None:
        if self._record is not None:
            data = await self._models[0].backend.record_routing(False)
            self._record.write_bytes(data)
            self._console.print(f"routing counts: {self._record} ({len(data):,} bytes)", style="dim")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    async def _show_start(self) -> None:
        """What is going on until everyone serves."""
        if self._term.number:
            waits = (model.run.wait_ready() for model in self._models)
            self._has_served(await asyncio.gather(*waits, return_exceptions=True))
            seconds = time.monotonic() - self._started
            log.warning("the new controller serves, with the nodes that were there; it took %.2f s", seconds)
            return
        for model in self._models:
            run = model.run
            await model.planned.site.invite(run.assignment, run.controller, run.hosts, self._say)
        with self._bars:
            self._has_served(await asyncio.gather(*(model.run.wait_ready() for model in self._models)))
        seconds = time.monotonic() - self._started
        models = [_started(model) for model in self._models]
        self._console.print(banner(models, self._url(), seconds, serving_in_words(self._settings)))

    def _has_served(self, waited: Sequence[BaseException | None]) -> None:
        """Raises why, where none of them serves."""
        failed = [why for why in waited if why is not None]
        if len(failed) == len(self._models):
            raise failed[0]
        self._served = True
        self._term.reports.serves()

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    def _hear_supervisor(self) -> None:
        """A signal that it got, or its end."""
        told = self._term.reports.told_to_stop()
        if not told:
            self._end_at_once()
        for _ in range(told):
            self._on_signal()

    def _beat(self) -> None:
        """Until the loop ends: the supervisor kills a process that does not."""
        self._term.reports.beats()
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _on_signal(self) -> None:
        """The first asks, the second insists: streams are told so in their last event. A third waits for nothing."""
        if self._insisted:
            self._end_at_once()
        if self._stop.is_set():
            self._insisted = True
            self._http.insist()
            asyncio.get_running_loop().call_later(INSIST_SECONDS, self._end_at_once)
            return
        self._console.print("stopping; once more to stop at once", style="dim")
        self._stop.set()

    def _end(self) -> None:
        """As somebody asked over HTTP, who is answered first: the drain waits for it."""
        self._console.print("stopping, as asked", style="dim")
        self._stop.set()

    def _end_at_once(self) -> None:
        os._exit(INSISTED)


def _started(model: ModelRun) -> StartedModel:
    members = model.run.controller.members
    experts = max((member.expert_error or 0.0 for member in members), default=0.0)
    dense = max((member.dense_error or 0.0 for member in members), default=0.0)
    isas = {str(member.node): member.isa for member in members if member.isa}
    return StartedModel(model.planned.topology, model.name, experts or None, dense or None, isas)
