"""Recorded routing: a compact file of counts over time, and plain counts as JSON. Bytes in, values out; no files.

Binary layout, little-endian, of a `.afroute` file (no pickle, nothing executable):
  header  8 bytes magic "AFROUTE1", u32 layers, u32 experts, u16 length of a name, the name in UTF-8 (the model)
  record  f64 seconds since the start, u8 class (0 prefill, 1 decode), u32 length, then so many bytes:
          a zlib stream of u32 counts[layers][experts], the rows routed since the record before
Records are appended. A truncated last record (a killed process) is ignored; whatever else does not fit is an error.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from afserve.errors import ConfigError
from afserve.placement.optimizer.problem import Floats, scenarios
from afserve.placement.rebalance.stats import KINDS, RoutingStats

MAGIC = b"AFROUTE1"
_HEAD = struct.Struct("<8sIIH")
_RECORD = struct.Struct("<dBI")
_LARGEST = 1 << 26  # counts of one record: 64 Mi values


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRecord:
    """The rows of one class that were routed since the record before it."""

    seconds: float
    kind: int
    counts_LE: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRecording:
    model: str
    layers: int
    experts: int
    records: tuple[RoutingRecord, ...]

    def replay(self, stats: RoutingStats) -> Iterator[float]:
        """Feeds the records to `stats` in order; yields the time after each, for a caller that decides in between."""
        for record in self.records:
            stats.merge(record.counts_LE, record.kind)
            stats.advance_windows(record.seconds)
            yield record.seconds

    def total_load(self, kind: int | None = None) -> Floats:
        """load_LE of the whole recording, or of one class."""
        total = np.zeros((self.layers, self.experts))
        for record in self.records:
            if kind is None or record.kind == kind:
                total += record.counts_LE
        return total


def encode_header(model: str, layers: int, experts: int) -> bytes:
    name = model.encode()[:65535]
    return _HEAD.pack(MAGIC, layers, experts, len(name)) + name


def encode_record(seconds: float, kind: int, counts_LE: ArrayLike) -> bytes:
    packed = zlib.compress(np.asarray(counts_LE).clip(0, 2**32 - 1).astype("<u4").tobytes(), 1)
    return _RECORD.pack(seconds, kind, len(packed)) + packed


def decode(data: bytes) -> RoutingRecording:
    """Raises ConfigError where `data` is not a recording."""
    if len(data) < _HEAD.size or data[:8] != MAGIC:
        raise ConfigError("not a routing recording: it does not begin with AFROUTE1")
    _, layers, experts, length = _HEAD.unpack_from(data)
    if not 0 < layers * experts <= _LARGEST:
        raise ConfigError(
            f"a routing recording of {layers} layers x {experts} experts is outside 1 to {_LARGEST} counts"
        )
    model = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
    records, at = [], _HEAD.size + length
    while at + _RECORD.size <= len(data):
        seconds, kind, packed = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + packed > len(data):
            break
        records.append(RoutingRecord(seconds, kind, _unpack(data[at : at + packed], kind, layers, experts)))
        at += packed
    return RoutingRecording(model, layers, experts, tuple(records))


def _unpack(packed: bytes, kind: int, layers: int, experts: int) -> NDArray[np.uint32]:
    wanted = layers * experts * 4
    if kind >= len(KINDS):
        raise ConfigError(f"a routing record of class {kind}: 0 is prefill, 1 is decode")
    try:
        raw = zlib.decompressobj().decompress(packed, wanted + 1)
    except zlib.error as error:
        raise ConfigError(f"a routing record is damaged: {error}") from error
    if len(raw) != wanted:
        raise ConfigError(f"a routing record has {len(raw)} bytes of counts, not {wanted}")
    return np.frombuffer(raw, dtype="<u4").reshape(layers, experts).astype(np.uint32)


def read_counts(text: str) -> dict[str, Floats]:
    """Scenarios by name, each load_LE, from plain JSON. Raises ConfigError on anything else.

    {"counts": [[per expert] per layer]}, the same one level deeper or as {"name": [[...]]} for several
    scenarios, {"domains": {...}} or {"scenarios": ...} alike, or a bare list.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the counts are not JSON: {error}") from error
    if isinstance(raw, dict):
        found = [raw[key] for key in ("counts", "domains", "scenarios") if key in raw]
        if not found:
            raise ConfigError('the counts file has no "counts": it is {"counts": [[per expert] per layer]}')
        raw = found[0]
    return _named(raw)


def _named(raw: Any) -> dict[str, Floats]:
    if isinstance(raw, dict):
        named = {str(name): _table(value) for name, value in raw.items()}
    elif isinstance(raw, list) and raw and (isinstance(raw[0], dict) or _depth(raw) == 3):
        named = {str(number): _table(value) for number, value in enumerate(raw)}
    else:
        named = {"counts": _table(raw)}
    if not named:
        raise ConfigError("the counts file names no scenario")
    shapes = {table.shape for table in named.values()}
    if len(shapes) > 1:
        raise ConfigError(f"the scenarios differ in shape: {sorted(shapes)} (layers, experts)")
    return named


def _table(value: Any) -> Floats:
    if isinstance(value, dict):
        value = value.get("counts")
    if not _numbers(value):
        raise ConfigError("counts are ragged or not numbers: every layer needs one number per expert")
    table: Floats = scenarios(value)[0]
    return table


def _numbers(value: Any) -> bool:
    """A list of lists of plain numbers: strings and booleans are refused although numpy would take them."""
    return isinstance(value, list) and all(
        isinstance(row, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in row)
        for row in value
    )


def _depth(value: Any) -> int:
    return 1 + _depth(value[0]) if isinstance(value, list) and value else int(isinstance(value, list))
