"""Tensors of decoder layers that nothing reads: by a config.json that lacks a field another model is computed than was
trained. Routed experts are not looked at.
"""

import re
from collections.abc import Collection

from afserve.families.pattern.naming import Naming
from afserve.models.identity import role_of
from afserve.models.weights import StoredTensors

_KNOWN = re.compile(r".*(inv_freq|[qkv]_scale|(input|output)_(scale|zero_point|global_scale)|\.masked_bias)")
"""Tables that are computed here, and scales of activations and KV caches, which stay in 16 bits."""


def unread(names: Collection[str], read: Collection[str], layers: int, naming: Naming) -> list[str]:
    """In order. `names` are all of a checkpoint's."""
    inside = tuple(naming.layer(layer, "") for layer in range(layers))
    left = set(names).difference(read)
    return sorted(
        name
        for name in left
        if name.startswith(inside) and role_of(name) == "attention" and not _KNOWN.fullmatch(name)
    )


def told_unread(checkpoint: StoredTensors, layers: int, naming: Naming) -> str:
    """What to tell the user after everything was read; nothing where there is nothing. Some writers store biases of
    zeros, or shared experts of no width."""
    found = [
        name for name in unread(checkpoint.names, checkpoint.read, layers, naming) if checkpoint.says(name)
    ]
    if not found:
        return ""
    which = f"{found[0]} and {len(found) - 1} more tensors are" if len(found) > 1 else f"{found[0]} is"
    return (
        f"{checkpoint.folder}: {which} not read: its config.json describes a model without. If it was trained with "
        "them, answers are wrong: look for the field that says so"
    )
