"""Layers that a checkpoint has beyond those of its config.json: a model without its last layers talks noise, and says
nothing of it.

DeepSeek and GLM store their modules of multi-token prediction as further layers; those are no part of the model. It
sees names, no numbers.
"""

import re
from collections.abc import Collection
from pathlib import Path

from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming

_PREDICTS = "eh_proj."  # joins a hidden state and the next token's embedding; no decoder layer has one


def check_no_more_layers(folder: Path, names: Collection[str], layers: int, naming: Naming) -> None:
    """Raises CheckpointError that names the first tensor beyond `layers`."""
    first_of = _first_tensors(names, naming, layers)
    if not first_of:
        return
    first, last, layers = min(first_of), max(first_of), layers // naming.parts
    beyond = f"layer {first}" if first == last else f"layers up to {last}"
    raise CheckpointError(
        f"{folder / 'config.json'}: {naming.count_field} is {layers}, but the checkpoint has {beyond} too, such as "
        f"{first_of[first]}; write as many as it has, or remove those tensors to serve the first {layers} alone"
    )


def _first_tensors(names: Collection[str], naming: Naming, layers: int) -> dict[int, str]:
    """Of each layer beyond that predicts no further tokens, one tensor."""
    named = re.compile(rf"{re.escape(naming.layer(0, '').removesuffix('0.'))}(\d{{1,9}})\.(.+)")
    found: dict[int, str] = {}
    predicting = set()
    for name in names:
        match = named.fullmatch(name)
        if match and int(match[1]) * naming.parts >= layers:
            layer = int(match[1])
            found[layer] = min(name, found.get(layer, name))
            if match[2].startswith(_PREDICTS):
                predicting.add(layer)
    return {layer: name for layer, name in found.items() if layer not in predicting}
