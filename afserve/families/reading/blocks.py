"""Layers that are one block each, attention, a state or an FFN alone: Nemotron's list of names, or its letters."""

from collections.abc import Sequence

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS
from afserve.families.reading.layers import FULL, LINEAR

MOE, MLP = "moe", "mlp"
_NAMES, _TEXT = "layers_block_type", "hybrid_override_pattern"
_LETTERS = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}
_EARLIER = {"mamba": LINEAR, "attention": FULL}


def blocks(fields: ConfigFields) -> tuple[str, ...]:
    """What each layer is. Raises the refusal for a name that is none, and where no block has experts."""
    name = _NAMES if fields.has(_NAMES) else _TEXT
    found: Sequence[object] = fields.items(name, MOST_LAYERS) if name == _NAMES else _letters(fields)
    kinds = tuple(_EARLIER.get(str(one), str(one)) for one in found)
    known = tuple(_LETTERS.values())
    if not kinds or not set(kinds) <= {*known}:
        raise fields.refuse(name, f"is not a list of {', '.join(known)}")
    if MOE not in kinds:
        raise fields.refuse(name, "has no block of experts; afserve serves Mixture-of-Experts models")
    return kinds


def block_count(fields: ConfigFields) -> int:
    """`num_hidden_layers` may be absent beside the list."""
    named, found = fields.optional("num_hidden_layers"), len(blocks(fields))
    if named is not None and named != found:
        raise fields.refuse(
            "num_hidden_layers", f"is not the number of blocks in {_NAMES} or {_TEXT}, {found}"
        )
    return found


def _letters(fields: ConfigFields) -> list[str]:
    text = fields.config.get(_TEXT)
    if not isinstance(text, str) or not 0 < len(text) <= MOST_LAYERS or not set(text) <= set(_LETTERS):
        raise fields.refuse(_TEXT, f"is not a text of {', '.join(_LETTERS)}, a letter for each layer")
    return [_LETTERS[letter] for letter in text]
