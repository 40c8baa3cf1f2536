"""Where HTTP is served, in the process of `afserve up` or in gateway processes that it starts, and with what limits."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from afserve.control.backend import Backend
from afserve.control.controller import Controller
from afserve.control.wire.load_values import GatewayLoad
from afserve.errors import CapacityError, ConfigError
from afserve.logs import STDERR, open_access_log
from afserve.server.access.classes import read_classes
from afserve.server.access.key_file import read_key_file
from afserve.server.access.keyring import LOOK_SECONDS, Keyring
from afserve.server.app import build_app
from afserve.server.endpoints.service import Service
from afserve.server.gate import hosts_of
from afserve.server.http.audit_log import AuditLog
from afserve.server.http.encryption import server_context
from afserve.server.http.settings import Listening, ServerSettings, read_keys
from afserve.server.serve import serve
from afserve.server.state.database import prepare_folder
from afserve.tls import is_loopback
from afserve.tokens.tokenizer import Tokenizer

_TO_SAY_SO = 1.0  # seconds beyond the drain, for gateways to say that they are done


def settings_for(asked: Listening, limits: ServerSettings, *, elsewhere: bool = False) -> ServerSettings:
    """The limits, with what the files and the lists of names stand for. `elsewhere`: gateways are processes.

    Raises ConfigError where other machines would send prompts and keys in plain text and nobody has said that they may.
    """
    if not asked.ssl_certfile and not asked.insecure_http and not is_loopback(asked.host):
        raise ConfigError(
            f"--host {asked.host}: other machines would send prompts and keys in plain text; give --ssl-certfile, or "
            "--insecure-http where something in front of it speaks HTTPS"
        )
    if not (asked.api_keys or asked.api_key_file or asked.insecure_http or is_loopback(asked.host)):
        raise ConfigError(
            f"--host {asked.host}: every machine that reaches it could use it; make a key with `afserve keys new NAME "
            "--file FILE` and give --api-keys FILE, or --insecure-http to serve whoever comes"
        )
    if elsewhere and limits.access_log == STDERR:
        raise ConfigError(
            "--access-log: with --gateways several processes write it; give a file: --access-log FILE"
        )
    if limits.otlp_endpoint and not limits.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint {limits.otlp_endpoint}: is no URL of HTTP, such as http://127.0.0.1:4318"
        )
    if limits.log_prompts and not (limits.access_log or limits.audit_log):
        raise ConfigError("--log-prompts: is for the lines of --access-log or --audit-log; give one of them")
    if asked.ssl_keyfile and not asked.ssl_certfile:
        raise ConfigError("--ssl-keyfile: is the key of --ssl-certfile; give both")
    certfile = str(asked.ssl_certfile or "")
    keyfile = str(asked.ssl_keyfile or certfile)
    if certfile:
        server_context(certfile, keyfile)
    return replace(
        limits,
        certfile=certfile,
        keyfile=keyfile,
        api_keys=read_keys(asked.api_key_file) if asked.api_key_file else (),
        admin_keys=read_keys(asked.admin_key_file) if asked.admin_key_file else (),
        keys_file=_keys_file(asked.api_keys),
        classes_file=_classes_file(asked.classes),
        state_dir=prepare_folder(asked.state_dir) if asked.state_dir else "",
        hosts=hosts_of(asked.host, asked.allowed_host),
        origins=asked.allowed_origin,
        access_log=_access_log(limits),
        audit_log=_audit_log(limits.audit_log),
    )


def _access_log(limits: ServerSettings) -> str | None:
    """Opened once here, so that a file that cannot be written is said first."""
    if limits.access_log is None or limits.access_log == STDERR:
        return limits.access_log
    path = str(Path(limits.access_log).resolve())
    open_access_log(path, limits.log_format)
    return path


def _audit_log(asked: str | None) -> str | None:
    """Opened once here, too."""
    if asked is None:
        return None
    path = str(Path(asked).resolve())
    AuditLog(path).finish_writing()
    return path


def _keys_file(path: Path | None) -> str:
    """Read once, so that a wrong file is refused before anything is served."""
    if path is None:
        return ""
    read_key_file(path)
    return str(path.resolve())


def _classes_file(path: Path | None) -> str:
    """As the one of keys."""
    if path is None:
        return ""
    read_classes(path)
    return str(path.resolve())


def serving_in_words(settings: ServerSettings) -> dict[str, str]:
    """For the banner: who may ask, and what of the gateways' state outlives them."""
    keys = "none is asked for"
    if settings.keys_file:
        keys = f"{len(read_key_file(settings.keys_file))} of {settings.keys_file}"
    elif settings.api_keys:
        keys = f"{len(settings.api_keys)}, without names and limits"
    kept = "in memory of each gateway, gone with it (--state-dir keeps it)"
    if settings.state_dir:
        kept = f"{settings.state_dir}, for all gateways of this host"
    return {"keys": keys, "files, batches, responses, limits": kept}


@asynccontextmanager
async def _looking(keys: Keyring) -> AsyncIterator[None]:
    """What a changed file of keys is worth is logged here when it changes, whether or not requests come."""

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            keys.read_changes()

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()


class Http(Protocol):
    async def check(self) -> None:
        """Raises what keeps this model from being served."""

    async def run(self, stop: asyncio.Event) -> None:
        """Answers until `stop` is set, then drains."""

    def insist(self) -> None:
        """A drain, now or later, waits for nobody."""

    def load_of(self, model: str) -> GatewayLoad:
        """What was counted here; gateways elsewhere tell the controller."""


class HttpHere:
    def __init__(
        self, models: Sequence[tuple[Backend, Tokenizer]], settings: ServerSettings, sock: socket.socket
    ) -> None:
        self._app = build_app(models, settings)
        self._service: Service = self._app.state.service
        self._sock = sock

    async def check(self) -> None:
        await self._service.text.start_ahead()

    async def run(self, stop: asyncio.Event) -> None:
        async with _looking(self._service.accounts.ring):
            await serve(self._app, self._sock, stop)

    def insist(self) -> None:
        self._service.answering.insist()

    def load_of(self, model: str) -> GatewayLoad:
        return self._service.models.named(model).metrics.load()


class HttpInProcesses:
    """The gateways check, serve and drain; the controller tells them when."""

    def __init__(self, controller: Controller, drain_seconds: float, keys_file: str = "") -> None:
        self._controller = controller
        self._keys = Keyring(path=keys_file)
        self._seconds = drain_seconds + _TO_SAY_SO

    async def check(self) -> None:
        """A gateway whose check fails says so to the controller."""

    async def run(self, stop: asyncio.Event) -> None:
        async with _looking(self._keys):
            await stop.wait()
        await self._controller.drain(self._seconds)

    def insist(self) -> None:
        self._controller.interrupt(CapacityError("the server was stopped at once; try again when it is back"))

    def load_of(self, model: str) -> GatewayLoad:
        return GatewayLoad()
