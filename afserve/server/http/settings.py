"""What the HTTP side is configured with: limits, deadlines in seconds, keys. Checked once, then read-only.

A limit is declared here once, with its range and what it is for; `afserve up` has a flag of the same name for each.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown
from afserve.logs import FORMATS, STDERR
from afserve.server.access.key_file import check_private
from afserve.settings import FileUse, check, flag_of, setting

KIB, MIB = 1 << 10, 1 << 20
_LINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SECONDS = Range(0.01, 86_400, whole=False)


def _limit(default: float, allowed: Range, help: str, topic: str = "") -> Any:
    return setting(default, help, allowed, metavar="N" if allowed.whole else "SECONDS", topic=topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where the API listens, by which names, and who may ask it: files and lists as the user wrote them."""

    TOPIC: ClassVar[str] = "http"

    host: str = setting("127.0.0.1", "Where the API listens.", common=True)
    port: int = setting(8000, "0 takes a free one.", Range(0, 65535), shows_range=True, common=True)
    served_model_name: tuple[str, ...] = setting(
        (), "What clients may call the model; answers have the first name.", metavar="NAME[,NAME]"
    )
    ssl_certfile: Path | None = setting(None, "Serve HTTPS with this certificate chain (PEM).", FileUse.READ)
    ssl_keyfile: Path | None = setting(
        None, "Its key; not needed where it is in --ssl-certfile.", FileUse.READ
    )
    insecure_http: bool = setting(False, "Serve plain HTTP to other machines.")
    api_key_file: Path | None = setting(
        None, "Clients must send one of these keys (one per line).", FileUse.READ
    )
    admin_key_file: Path | None = setting(None, "Keys for /admin and /status (one per line).", FileUse.READ)
    api_keys: Path | None = setting(
        None,
        "Clients must send a key of this file, which `afserve keys` writes; read again when it changes.",
        FileUse.READ,
        common=True,
    )
    classes: Path | None = setting(
        None,
        "Classes of service in this TOML file: turns, weights and times by name, chosen by key or service_class.",
        FileUse.READ,
    )
    state_dir: Path | None = setting(
        None,
        "Keep files, batches, responses and counts of keys here, for all gateways of this host; else in memory.",
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Further names that requests may call this server by.", metavar="NAME[,NAME]"
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Web pages, as https://chat.example.org, that may ask this server.", metavar="ORIGIN[,ORIGIN]"
    )

    def names(self, own: str) -> tuple[str, ...]:
        """What clients may call a model that is called `own` where nothing else was asked; the first one leads."""
        return tuple(dict.fromkeys(self.served_model_name)) or (own,)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`api_keys` empty means that no key is asked for. `admin_keys` guard what changes or shows the cluster.

    `certfile` and `keyfile` are empty where plain HTTP is served. `hosts` are the names that a request may call this
    server by, all if empty; `origins` the web pages that may post. `keys_file` is that of
    `afserve keys`, `classes_file` has the classes of service; `state_dir` empty keeps files, batches, responses and
    counts in memory.
    """

    TOPIC: ClassVar[str] = "limits"

    max_body_bytes: int = _limit(8 * MIB, Range(KIB, 1 << 30), "Largest body of a request.")
    max_header_bytes: int = _limit(64 * KIB, Range(KIB, MIB), "Largest head of a request.")
    max_answer_bytes: int = _limit(64 * MIB, Range(KIB, 1 << 32), "Largest answer that is not a stream.")
    max_inflight: int = _limit(4096, Range(1, 1 << 20), "Requests that are answered at once.")
    max_sequences: int = _limit(256, Range(1, 1 << 16), "Prompts times n of one request.")
    max_connections: int = _limit(
        4096, Range(1, 1 << 20), "Open connections; the longest idle one makes room."
    )
    max_connections_per_client: int = _limit(2048, Range(1, 1 << 20), "The same for one client address.")
    head_deadline: float = _limit(
        15.0, _SECONDS, "Seconds for a head that has begun to arrive, and before that for TLS."
    )
    read_deadline: float = _limit(30.0, _SECONDS, "Seconds for a request's body to arrive.")
    write_deadline: float = _limit(10.0, _SECONDS, "Seconds that a client may take nothing of its stream.")
    keep_alive: float = _limit(
        75.0, _SECONDS, "Seconds that a connection stays open until its next request begins."
    )
    text_seconds: float = _limit(10.0, _SECONDS, "CPU seconds to prepare one request (template, tokens).")
    text_mib: int = _limit(1024, Range(64, 1 << 20), "Memory to prepare one request, in MiB.")
    text_processes: int = _limit(2, Range(1, 64), "Processes that prepare large requests and chats.")
    text_waiting: int = _limit(256, Range(0, 1 << 16), "Requests that may wait for those processes.")
    drain_seconds: float = _limit(
        4.0, Range(0, 86_400, whole=False), "Seconds that a stop waits for answers."
    )
    max_responses: int = _limit(1024, Range(0, 1 << 20), "Responses that are kept to be followed.")
    max_responses_bytes: int = _limit(64 * MIB, Range(KIB, 1 << 36), "The same in bytes.")
    response_seconds: float = _limit(86_400.0, Range(1, 1e8, whole=False), "Seconds that a response is kept.")
    max_file_bytes: int = _limit(
        256 * MIB, Range(KIB, 1 << 40), "All files that are kept, in bytes; a key has half at most."
    )
    file_seconds: float = _limit(604_800.0, Range(1, 1e8, whole=False), "Seconds that a file is kept.")
    restart_seconds: float = _limit(
        30.0, _SECONDS, "Seconds that a gateway which restarts alone waits for its streams.", topic="losses"
    )
    ttft: float = _limit(
        0.0,
        Range(0, 86_400, whole=False),
        "Refuse requests with 429 whose first token is predicted later than this; 0 for any. `ttft` of a request goes "
        "before it.",
    )
    tpot: float = _limit(
        0.0, Range(0, 86_400, whole=False), "The same for the mean time between tokens (`tpot`)."
    )
    resume_seconds: float = _limit(
        300.0, _SECONDS, "Longest time that a request may ask to be kept without a connection."
    )
    resume_requests: int = _limit(
        1024, Range(0, 1 << 20), "Requests that are kept so, answered ones included."
    )
    resume_mib: int = _limit(256, Range(0, 1 << 20), "Memory for them, in MiB.")
    access_log: str | None = setting(
        None,
        "A line for each request, into a file that gateways share; without FILE to stderr.",
        metavar="FILE",
        bare=STDERR,
        topic="logs",
    )
    audit_log: str | None = setting(
        None,
        "An entry for each request that asks or changes something, or is refused: key, model, tokens; no text. Each is "
        "chained to the one before (`afserve audit` checks). Gateways share the file.",
        metavar="FILE",
        topic="logs",
    )
    log_prompts: bool = setting(
        False,
        "Lines of --access-log and --audit-log show the beginning of each body, prompts included.",
        topic="logs",
    )
    log_format: str = setting("text", "How log lines look.", FORMATS, topic="logs")
    otlp_endpoint: str | None = setting(
        None,
        "Send spans of requests to this OpenTelemetry collector (OTLP over HTTP).",
        metavar="URL",
        topic="logs",
    )
    strict: bool = setting(
        False,
        "Refuse wishes that a model cannot follow (thinking, effort, hosted tools, ...); else they are passed over, "
        "and named in the header x-afserve-ignored.",
        topic="http",
    )
    answer_tokens: int = _limit(
        1 << 20,
        Range(0, 1 << 28),
        "Token ids of earlier answers that are kept where the tokenizer would spell them otherwise, so that next turns "
        "begin with them; 0 keeps none.",
        topic="kv",
    )
    changing_lines: tuple[str, ...] = setting(
        ("x-anthropic-billing-header",),
        "Lines `NAME: ...` in front of system prompts that are left out of them: they differ with every request, so "
        "that nothing behind them would be found in the cache. `off` keeps all.",
        metavar="NAME[,NAME]",
        topic="kv",
    )
    warm_ahead: bool = setting(
        False,
        "Once a chat is answered, compute what is certain of its next turn, with the answer as the template writes "
        "it there, on nodes that have nothing else to do.",
        topic="kv",
    )
    share_prefixes: bool = setting(
        False,
        "With keys: cached beginnings of prompts are shared by all keys, each of which can tell so.",
        topic="kv",
    )
    open_metrics: bool = setting(False, "/metrics needs no key where there is one.", topic="logs")
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    keys_file: str = ""
    classes_file: str = ""
    state_dir: str = ""
    log_level: str = "warning"
    hosts: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()
    certfile: str = ""
    keyfile: str = ""

    def __post_init__(self) -> None:
        check(self, flag_of)
        for name in self.changing_lines:
            if not _LINE_NAME.fullmatch(name):
                raise ConfigError.about(
                    "changing-lines", f"{shown(name)} is no name of a line; write letters, digits and hyphens"
                )

    @property
    def left_out_lines(self) -> tuple[str, ...]:
        return () if self.changing_lines == ("off",) else self.changing_lines


def read_keys(path: str | Path) -> tuple[str, ...]:
    """API keys from a file, one per line; empty lines and lines that begin with # do not count."""
    try:
        with open(path, encoding="utf-8") as file:
            check_private(path, os.fstat(file.fileno()), "api-key-file")
            lines = file.read(MIB).splitlines()
    except OSError as error:
        raise ConfigError.about("api-key-file", f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError.about("api-key-file", f"{path}: is not UTF-8 text") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError.about("api-key-file", f"{path} holds no key; write one per line")
    return keys
