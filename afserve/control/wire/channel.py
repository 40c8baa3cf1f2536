"""What the ends of the control plane's gRPC share: methods, limits, the per-run token, and how a server checks it.

The token lives in a file that only this user can read, never in an argument list or the environment.
"""

import asyncio
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import grpc.aio

from afserve.errors import ConfigError

SERVICE = "afserve.control.Controller"
JOIN = "Join"
METHOD = f"/{SERVICE}/{JOIN}"
GATEWAY = "afserve.control.Gateway"
ATTEND = "Attend"
ATTEND_METHOD = f"/{GATEWAY}/{ATTEND}"
TOKEN_KEY = "authorization"  # noqa: S105  the name of a header
TOKEN_FILE = "token"  # noqa: S105  the name of a file

# A prompt of a million tokens is 4 MB; prompt log-probabilities with 20 alternatives are the largest reply.
_TO_NODE_BYTES = 16 << 20
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


async def authenticate(context: Context, token: str) -> None:
    """Ends the call of whoever has not the run's token."""
    given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
    if not hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode()):
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "the token is not this run's; pass the controller's --token-file"
        )


async def write(outbox: "asyncio.Queue[bytes]", context: Context) -> None:
    """Send what is put into `outbox`, until cancelled."""
    while True:
        await context.write(await outbox.get())


def new_token(folder: Path) -> Path:
    """Write a fresh token into `folder`, readable by this user only, and return the file's path."""
    path = folder / TOKEN_FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return path


def read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: cannot be read: {error}", param="token_file") from error
    if not token:
        raise ConfigError(f"--token-file {path}: is empty", param="token_file")
    return token
