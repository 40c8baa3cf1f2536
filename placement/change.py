"""What changes from one placement to the next, as text: a large placement is said whole once, then only this.

Example: DeepSeek-V3's 58 layers on 1,000 nodes of two slots are 2.4 MB of JSON; one node less is 50 kB.
"""

import json
from dataclasses import replace

from afserve.errors import ConfigError
from afserve.json_file import parse
from afserve.placement.placement import LayerPlacement, Placement
from afserve.placement.placement_text import MOST_CHARACTERS, MOST_EPOCH, MOST_NODES, read_layer, whole

_WHERE = "not a change of a placement"


def change(old: Placement, new: Placement) -> str | None:
    """The rows of `new` that `old` has not, or None where they are of different models or `new` has fewer nodes."""
    if (len(old.layers), old.experts) != (len(new.layers), new.experts) or new.nodes < old.nodes:
        return None
    layers = {}
    for number, (was, will) in enumerate(zip(old.with_nodes(new.nodes).layers, new.layers, strict=True)):
        if was is will:
            continue
        rows = _differing(was, will)
        layers[number] = {
            "nodes": rows,
            "slots": [will.slots[node] for node in rows],
            "share": [will.share[node] for node in rows],
            "max_load": will.max_load,
            "lower_bound": will.lower_bound,
        }
    return json.dumps({"epoch": new.epoch, "nodes": new.nodes, "layers": layers}, separators=(",", ":"))


def _differing(was: LayerPlacement, will: LayerPlacement) -> list[int]:
    """Nodes whose rows are not the same. Most rows of two placements that follow each other are the same objects."""
    rows = zip(was.slots, will.slots, was.share, will.share, strict=True)
    return [
        node
        for node, (slots, new_slots, share, new_share) in enumerate(rows)
        if not (slots is new_slots and share is new_share) and (slots != new_slots or share != new_share)
    ]


def changed(old: Placement, text: str) -> Placement:
    """The placement that `change` was asked for. Raises ConfigError on anything that is not a change of `old`."""
    if len(text) > MOST_CHARACTERS:
        raise _refusal(f"has {len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
    raw = parse(text, _WHERE, ConfigError)
    if not isinstance(raw, dict) or not isinstance(raw.get("layers"), dict):
        raise _refusal("an object with epoch, nodes and layers was expected")
    nodes = whole("nodes", raw.get("nodes"), old.nodes, MOST_NODES)
    base = old.with_nodes(nodes)
    layers = list(base.layers)
    for name, entry in raw["layers"].items():
        number = whole(
            "layers", int(name) if name.isdecimal() and len(name) < 9 else name, 0, len(layers) - 1
        )
        layers[number] = _merged(number, layers[number], entry, nodes)
    epoch = whole("epoch", raw.get("epoch"), 0, MOST_EPOCH)
    return replace(base, epoch=epoch, layers=tuple(layers))


def _merged(number: int, old: LayerPlacement, entry: object, nodes: int) -> LayerPlacement:
    new = read_layer(f"layers[{number}]", entry)
    rows = entry.get("nodes") if isinstance(entry, dict) else None
    if not isinstance(rows, list) or not len(rows) == len(new.slots) == len(new.share):
        raise _refusal(f"layer {number} does not say which nodes its rows are of")
    slots, share = list(old.slots), list(old.share)
    for row, node in enumerate(rows):
        where = whole(f"layers[{number}].nodes", node, 0, nodes - 1)
        slots[where], share[where] = new.slots[row], new.share[row]
    return LayerPlacement(tuple(slots), tuple(share), new.max_load, new.lower_bound)


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"{_WHERE}: {why}")
