"""What the ends of the control plane's gRPC share: methods, limits, the per-run token, and how a server checks it.

The token lives in a file that only this user can read, never in an argument list or the environment.
"""

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from afserve.errors import ConfigError
from afserve.tiles import MOST_TILE_BYTES
from afserve.tls import Certificates, CertifiedRole, Pems, lacks

log = logging.getLogger("afserve.control")

SERVICE = "afserve.control.Controller"
JOIN = "Join"
METHOD = f"/{SERVICE}/{JOIN}"
GATEWAY = "afserve.control.Gateway"
ATTEND = "Attend"
ATTEND_METHOD = f"/{GATEWAY}/{ATTEND}"
TOKEN_KEY = "authorization"  # noqa: S105  the name of a header
TOKEN_FILE = "token"  # noqa: S105  the name of a file

# A prompt of a million tokens is 4 MB; prompt log-probabilities with 20 alternatives are the largest reply.
_TO_NODE_BYTES = (16 << 20) + MOST_TILE_BYTES
_FROM_NODE_BYTES = 64 << 20
# A stopped process (Ctrl-Z, a paused virtual machine) answers no ping and shall lose nobody for it within a minute.
# The controller notices silent nodes by their heartbeats; this is for nodes whose controller's host is gone.
_KEEPALIVE_MS = 30_000
_ANSWER_MS = 120_000
_AGAIN_MS, _AGAIN_MOST_MS = 50, 250  # between two attempts to reach whoever does not listen yet, or again


def options(*, receive: str, shares_port: bool = False) -> Sequence[tuple[str, int]]:
    """gRPC options of the end that receives `receive` ("to_node" or "from_node") messages.

    `shares_port` where another socket of this user keeps the port for whoever listens next.
    """
    limit = _TO_NODE_BYTES if receive == "to_node" else _FROM_NODE_BYTES
    return (
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", _FROM_NODE_BYTES),
        ("grpc.max_metadata_size", 8192),
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _ANSWER_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        ("grpc.initial_reconnect_backoff_ms", _AGAIN_MS),
        ("grpc.max_reconnect_backoff_ms", _AGAIN_MOST_MS),
    )


Context: TypeAlias = grpc.aio.ServicerContext


def dial(address: str, receive: str, certificates: Certificates | None, role: CertifiedRole) -> grpc.Channel:
    """The end that calls. With certificates, whoever answers has to have one for `role`."""
    settings = options(receive=receive)
    if certificates is None:
        return grpc.insecure_channel(address, options=settings)
    pems = certificates.current()
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(pems.authority, pems.key, pems.certificate),
        options=(*settings, ("grpc.ssl_target_name_override", role.dns)),
    )


def listen(server: grpc.aio.Server, where: str, certificates: Certificates | None) -> int:
    """The port. With certificates, whoever calls has to have one of the same authority. Raises RuntimeError."""
    if certificates is None:
        return int(server.add_insecure_port(where))
    last = certificates.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Asked before each handshake; None leaves everything as it is."""
        nonlocal last
        now = certificates.current()
        if now is last:
            return None
        last = now
        return _configuration(now)

    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(last), renewed, require_client_authentication=True
    )
    return int(server.add_secure_port(where, credentials))


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.certificate)], root_certificates=pems.authority
    )


async def authenticate(context: Context, token: str) -> None:
    """Ends the call of whoever has not the run's token. To others the headers of the answer are sent: while a first
    write still sends them, gRPC refuses to end the call, and the other end would wait for ever."""
    given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
    if not hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode()):
        why = "the token is not this run's; pass the controller's --token-file"
        log.warning("%s was refused: %s", context.peer(), why)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
    await context.send_initial_metadata(())


async def certify(context: Context, role: CertifiedRole) -> None:
    """Ends the call of whoever came over TLS with a certificate that is for other roles."""
    found = context.auth_context()
    if b"ssl" not in found.get("transport_security_type", ()):
        return
    names = [name.decode(errors="replace") for name in found.get("x509_subject_alternative_name", ())]
    if why := lacks(names, role):
        who = b", ".join(found.get("x509_common_name", ())).decode(errors="replace")
        log.warning("%s (%s) was refused: %s", who, context.peer(), why)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{why}; `afserve certs issue --role {role}`")


async def write(outbox: "asyncio.Queue[bytes]", context: Context) -> None:
    """Send what is put into `outbox`, until cancelled."""
    while True:
        await context.write(await outbox.get())


def new_token(folder: Path, token: str | None = None) -> Path:
    """Write a token, a fresh one if none is given, into `folder` and return the file's path."""
    return write_token(folder / TOKEN_FILE, token)


def write_token(path: Path, token: str | None = None) -> Path:
    """Readable by this user only. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token or secrets.token_urlsafe(32))
    return path


def read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: cannot be read: {error}", param="token_file") from error
    if not token:
        raise ConfigError(f"--token-file {path}: is empty", param="token_file")
    return token
