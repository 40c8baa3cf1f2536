"""The JSON of a placement: text in, checked plain numbers out. Every error names its place in the file.

Sizes are checked before anything is built, so a hostile body costs neither time nor memory. Whether slots and shares
fit together is checked by `placement.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from afserve.errors import ConfigError, shown
from afserve.json_file import parse

MOST_CHARACTERS = 64 << 20
MOST_LAYERS = 1 << 12
MOST_NODES = 1 << 16
MOST_EXPERTS = 1 << 16
MOST_EPOCH = (1 << 31) - 1  # rows name the epoch in 32 bits
MOST_ROWS = 1 << 18  # nodes of all layers together: 61 layers on 4,096 nodes
MOST_SLOTS = 1 << 20  # of all nodes and layers together: 61 layers of 256 experts, each 64 times
MOST_LOAD = 1e18  # rows of one layer
SHARE_TOLERANCE = 1e-6
FREE = -1
_WHERE = "not a placement file"
_SLOT = f"the number of an expert in [0, {MOST_EXPERTS - 1}] or {FREE} for none"
_SHARE = "a share in [0, 1]"


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """One MoE layer. `slots[n][s]` is the expert in slot s of node n (FREE = empty); `share` is parallel to it.

    `max_load` and `lower_bound` are what the optimizer expected and proved (rows on the fullest node, 0 = not
    known).
    """

    slots: tuple[tuple[int, ...], ...]
    share: tuple[tuple[float, ...], ...]
    max_load: float = field(default=0.0, compare=False)
    lower_bound: float = field(default=0.0, compare=False)

    def replicas(self, expert: int) -> tuple[tuple[int, int, float], ...]:
        """(node, slot, share) of each replica of `expert`, in node order."""
        return tuple(
            (node, slot, self.share[node][slot])
            for node, row in enumerate(self.slots)
            for slot, held in enumerate(row)
            if held == expert
        )


def read_placement(text: str) -> tuple[int, int, int, tuple[LayerPlacement, ...]]:
    """(epoch, nodes, experts, layers).

    Raises ConfigError on the first thing that is missing, of a wrong type, out of range or too much.
    """
    if len(text) > MOST_CHARACTERS:
        raise _refusal("the file", f"has {len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
    # Brackets stand for lists and objects; whatever has more of them than a placement may is not parsed at all.
    if text.count("[") > 2 * (MOST_ROWS + MOST_LAYERS) + 1 or text.count("{") > MOST_LAYERS + 1:
        raise _refusal("the file", f"has more than {MOST_ROWS:,} nodes or {MOST_LAYERS:,} layers in it")
    raw = parse(text, _WHERE, ConfigError)
    if not isinstance(raw, dict):
        raise _refusal("the file", f"a JSON object was expected, found {type(raw).__name__}")
    nodes = whole("nodes", _present(raw, "nodes", ""), 1, MOST_NODES)
    entries = _list("layers", _present(raw, "layers", ""), MOST_LAYERS)
    if not entries:
        raise _refusal("layers", "is empty; a placement has at least one layer")
    layers = tuple(read_layer(f"layers[{number}]", entry) for number, entry in enumerate(entries))
    if sum(len(row) for layer in layers for row in layer.slots) > MOST_SLOTS:
        raise _refusal("layers", f"have more than {MOST_SLOTS:,} slots together")
    highest = max((max(row, default=FREE) for layer in layers for row in layer.slots), default=FREE)
    experts = whole("experts", raw.get("experts", highest + 1), 1, MOST_EXPERTS)
    return whole("epoch", raw.get("epoch", 0), 0, MOST_EPOCH), nodes, experts, layers


def read_layer(where: str, entry: object) -> LayerPlacement:
    if not isinstance(entry, dict):
        raise _refusal(where, f"{shown(entry)} is not an object with slots and share")
    slots = _rows(f"{where}.slots", _present(entry, "slots", where), _is_slot, _SLOT)
    share = _rows(f"{where}.share", _present(entry, "share", where), _is_share, _SHARE)
    load = _rows_expected(f"{where}.max_load", entry.get("max_load", 0.0))
    bound = _rows_expected(f"{where}.lower_bound", entry.get("lower_bound", 0.0))
    return LayerPlacement(
        tuple(map(tuple, slots)), tuple(tuple(map(float, row)) for row in share), load, bound
    )


def _rows(where: str, value: object, fits: Callable[[Any], bool], what: str) -> list[list[Any]]:
    """One list of numbers per node."""
    rows = _list(where, value, MOST_NODES)
    for node, row in enumerate(rows):
        for slot, item in enumerate(_list(f"{where}[{node}]", row, MOST_SLOTS)):
            if not fits(item):
                raise _refusal(f"{where}[{node}][{slot}]", f"{shown(item)} is not {what}")
    return rows


def _is_slot(value: Any) -> bool:
    return type(value) is int and FREE <= value < MOST_EXPERTS


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 <= value <= 1.0 + SHARE_TOLERANCE


def _rows_expected(where: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= MOST_LOAD:
        raise _refusal(where, f"{shown(value)} is not a number of rows in [0, {MOST_LOAD:g}]")
    return float(value)


def whole(where: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _refusal(where, f"{shown(value)} is not a whole number in [{low}, {high}]")
    return value


def _list(where: str, value: object, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise _refusal(where, f"{shown(value)} is not a list")
    if len(value) > most:
        raise _refusal(where, f"has {len(value):,} entries, at most {most:,} are read")
    return value


def _present(table: dict[str, Any], key: str, where: str) -> object:
    if key not in table:
        raise _refusal(f"{where}.{key}".lstrip("."), "is missing")
    return table[key]


def _refusal(where: str, why: str) -> ConfigError:
    return ConfigError(f"{_WHERE}: {where}: {why}")
