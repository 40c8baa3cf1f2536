"""What `--kv-events` says, as a value: an endpoint, or vLLM's `--kv-events-config` by its own words. No sockets."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown
from afserve.json_file import read_setting

FLAG, PARAM = "--kv-events", "kv_events"
_EXAMPLE = "tcp://127.0.0.1:5557"
_MOST_NODES = 1024
_PORT = Range(1, 65535 - _MOST_NODES)
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})\Z")
_IPC = re.compile(r"ipc://\S+\Z")
_COUNTS: Mapping[str, Range] = {
    "buffer_steps": Range(1, 1 << 20),
    "hwm": Range(1, 1 << 24),
    "max_queue_size": Range(1, 1 << 20),
}
_TEXTS = ("endpoint", "replay_endpoint", "topic", "hash_seed")
_CHOICES: Mapping[str, tuple[str, ...]] = {"publisher": ("zmq", "null"), "encoding": ("array", "map")}
_KEYS = ("enable_kv_cache_events", *_CHOICES, *_TEXTS, *_COUNTS)
MOST_CHARACTERS = 1 << 12


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """`tcp://HOST:PORT` or `ipc://PATH`. Attention node n has the port n above it, or the path with `_n` behind it."""

    text: str

    @property
    def binds(self) -> bool:
        """As vLLM: bound where the host is `*` or `::` or it is a path. Beside that where it is this machine alone;
        elsewhere a receiver is expected to listen."""
        if self.text.startswith("ipc://"):
            return True
        host = self.text[len("tcp://") :].rpartition(":")[0].strip("[]")
        return host in ("*", "::", "localhost") or _is_loopback(host)

    def of_node(self, node: int) -> str:
        if self.text.startswith("ipc://"):
            return f"{self.text}_{node}" if node else self.text
        place, _, port = self.text.rpartition(":")
        return f"{place}:{int(port) + node}"


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """`topic` stands before each message. `buffer_steps` are messages that can be asked for again, `hwm` those that may
    wait for a slow receiver, `max_queue_size` those that may wait to be sent.

    `hash_seed`: blocks are named as vLLM names them with `--prefix-caching-hash-algo sha256_cbor` and this
    PYTHONHASHSEED; without it by the last 8 bytes of the names that they have here. `encoding`: array has the fields
    in the order of vLLM's classes, map has them by name.
    """

    endpoint: EventEndpoint
    replay: EventEndpoint | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 10_000
    hash_seed: str | None = None
    encoding: Literal["array", "map"] = "array"


def kv_events_of(text: str) -> KvEventsConfig | None:
    """None where nothing is told. Raises ConfigError that names the key, its value, and what it may be."""
    if not text:
        return None
    if len(text) <= MOST_CHARACTERS and not text.lstrip().startswith("{"):
        return KvEventsConfig(_endpoint("", text))
    return _of(read_setting(text, FLAG, _KEYS, MOST_CHARACTERS, f'{{"endpoint": "{_EXAMPLE}"}}'))


def _of(given: Mapping[str, object]) -> KvEventsConfig | None:
    for name, value in given.items():
        if name in _COUNTS and not _COUNTS[name].holds(value):
            _refuse(f"{name}: {shown(value)} is not {_COUNTS[name]}")
        if name in _CHOICES and value not in _CHOICES[name]:
            _refuse(f"{name}: {shown(value)} is none of {', '.join(_CHOICES[name])}")
        if name in _TEXTS and not _is_text(value):
            _refuse(f"{name}: {shown(value)} is not a text")
    enabled = given.get("enable_kv_cache_events", True)
    if not isinstance(enabled, bool):
        _refuse(f"enable_kv_cache_events: {shown(enabled)} is neither true nor false")
    if not enabled or given.get("publisher") == "null":
        return None
    kept: dict[str, object] = {
        name: given[name] for name in (*_COUNTS, "topic", "hash_seed", "encoding") if name in given
    }
    endpoint = _endpoint("endpoint: ", str(given.get("endpoint", _EXAMPLE)))
    replay = (
        _endpoint("replay_endpoint: ", str(given["replay_endpoint"])) if "replay_endpoint" in given else None
    )
    if replay is not None and not replay.binds:
        _refuse(
            f"replay_endpoint: {shown(replay.text)} is another host's; name * or an address of this machine"
        )
    _apart(endpoint, replay)
    return KvEventsConfig(endpoint, replay, **kept)  # type: ignore[arg-type]  # each was looked at above


def _endpoint(where: str, text: str) -> EventEndpoint:
    found = _TCP.match(text)
    if found is None and not _IPC.match(text):
        _refuse(
            f"{where}{shown(text)} is no endpoint; write it like {_EXAMPLE}, tcp://*:5557 or ipc:///run/afserve-kv"
        )
    if found is not None and not _PORT.holds(int(found[2])):
        _refuse(f"{where}{shown(text)}: the port has to be {_PORT}: attention nodes have the ones above it")
    return EventEndpoint(text)


def _apart(endpoint: EventEndpoint, replay: EventEndpoint | None) -> None:
    """Nodes of one kind have the ports above; those of both may meet where they begin close to each other, which a
    node finds when it binds. Equal ones always do."""
    if replay is not None and replay.of_node(0).rpartition(":")[2] == endpoint.of_node(0).rpartition(":")[2]:
        _refuse(
            f"replay_endpoint: {shown(replay.text)} has the port of the endpoint; take another one, 1,024 above"
        )


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False  # it holds half of a surrogate pair


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"{FLAG}: {why}", param=PARAM)
