"""What a cache tells, in the messages of vLLM's KV events: msgpack of a batch, blocks by whole numbers of 64 bits."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import cbor2
import msgpack

from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from afserve.kv_events_config import KvEventsConfig

_MEDIUM = "GPU"  # vLLM's word for the memory that attention reads, whatever it is
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys"),
)
_REMOVED = ("block_hashes", "medium")
_BATCH = ("ts", "events", "data_parallel_rank")


class EventWords:
    """Keeps how each block is called outside, so that blocks that go and parents are called as they were."""

    def __init__(self, config: KvEventsConfig, node: int, block_size: int) -> None:
        self._map, self._node, self._size = config.encoding == "map", node, block_size
        self._name = _own_name if config.hash_seed is None else ChainedHash(config.hash_seed).name
        self._called: dict[Hash, bytes] = {}

    def batch(self, time: float, events: Sequence[CacheEvent]) -> bytes:
        """`time` in seconds since 1970."""
        said = [self._event(event) for event in events]
        packed: bytes = msgpack.packb(self._fields(_BATCH, (time, said, self._node)), use_bin_type=True)
        return packed

    def _event(self, event: CacheEvent) -> Any:
        match event:
            case BlocksStored(names, parent, tokens, salt, gone):
                above = self._parent(parent, gone, salt)
                before = None if above is None else _told(above)
                for name, own in zip(names, _parts(tokens, self._size), strict=True):
                    above = self._called[name] = self._name(name, above, own, salt)
                called = [_told(self._called[name]) for name in names]
                extra = [(salt,), *[None] * (len(names) - 1)] if salt and parent is None else None
                values = (called, before, tokens, self._size, None, _MEDIUM, None, extra)
                return self._tagged("BlockStored", _STORED, values)
            case BlocksRemoved(names):
                called = [_told(self._called.pop(name)) for name in names]
                return self._tagged("BlockRemoved", _REMOVED, (called, _MEDIUM))
            case BlocksCleared():
                self._called.clear()
                return self._tagged("AllBlocksCleared", (), ())

    def _parent(self, name: Hash | None, gone: Sequence[int], salt: str) -> bytes | None:
        """How it is, or was, called. `gone` are the tokens up to it, where it is no longer told."""
        if name is None or not gone:
            return None if name is None else self._called[name]
        above: bytes | None = None
        for own in _parts(gone, self._size):
            above = self._name(name, above, own, salt)
        return above

    def _tagged(self, kind: str, names: Sequence[str], values: Sequence[object]) -> Any:
        return self._fields(("type", *names), (kind, *values))

    def _fields(self, names: Sequence[str], values: Sequence[object]) -> Any:
        return dict(zip(names, values, strict=True)) if self._map else list(values)


def _parts(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for at in range(0, len(tokens), size):
        yield tokens[at : at + size]


def _own_name(name: Hash, parent: bytes | None, tokens: Sequence[int], salt: str) -> bytes:
    return name


class ChainedHash:
    """vLLM's names by sha256_cbor: SHA-256 of the canonical CBOR of (the parent's name, tokens, extra keys). The first
    block's parent is the hash of PYTHONHASHSEED, and its extra keys are the salt."""

    def __init__(self, seed: str) -> None:
        self._root = _digest(seed)

    def name(self, name: Hash, parent: bytes | None, tokens: Sequence[int], salt: str) -> bytes:
        extra = (salt,) if salt and parent is None else None
        return _digest((self._root if parent is None else parent, tuple(tokens), extra))


def _digest(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def _told(name: bytes) -> int:
    """As vLLM tells bytes: their last 64 bits."""
    return int.from_bytes(name[-8:], "big")
