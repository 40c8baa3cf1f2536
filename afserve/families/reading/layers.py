"""Which layer has what: by a list of config.json, or by the rule of its family where there is none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS, Range
from afserve.spec_parts import AttentionSpec

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def by_type(
    fields: ConfigFields, each: Mapping[str, AttentionSpec], otherwise: Sequence[str] = (), every: int = 0
) -> list[AttentionSpec]:
    """One of `each` for each layer, as `layer_types` says."""
    return [each[name] for name in layer_types(fields, *each, otherwise=otherwise, every=every)]


def layer_types(
    fields: ConfigFields,
    *known: str,
    field: str = "layer_types",
    otherwise: Sequence[str] = (),
    every: int = 0,
) -> tuple[str, ...]:
    """One of `known` for each layer. Where config.json has no such `field`, the names `otherwise`; or each
    `every`-th layer is the second of `known`; or all are the first of them."""
    layers = fields.integer("num_hidden_layers")
    found = fields.items(field, layers, "num_hidden_layers")
    names = tuple(name for name in found if isinstance(name, str) and name in known)
    if found and len(names) < layers:
        raise fields.refuse(
            field, f"is not one of {', '.join(known)} for each of {layers} layers (num_hidden_layers)"
        )
    if names:
        return names
    if every:
        return tuple(known[(layer + 1) % every == 0] for layer in range(layers))
    return tuple(otherwise) or known[:1] * layers


def narrow_ones_turn(turned: AttentionSpec, window: int | None) -> dict[str, AttentionSpec]:
    """By type: layers with windows turn heads, full ones do not."""
    return {SLIDING: replace(turned, window=window), FULL: replace(turned, rope=None)}


def layer_numbers(fields: ConfigFields, name: str, each: Range) -> tuple[float, ...]:
    """A number for each layer; empty where config.json has no such field."""
    layers, found = fields.integer("num_hidden_layers"), fields.reals(name, each, MOST_LAYERS)
    if found and len(found) != layers:
        raise fields.refuse(name, f"is not a number for each layer of num_hidden_layers {layers}")
    return found


def layer_marks(fields: ConfigFields, name: str) -> tuple[int, ...]:
    """0 or 1 for each layer; empty where config.json has no such field."""
    layers = fields.integer("num_hidden_layers")
    marks = fields.integers(name, Range(0, 1), MOST_LAYERS)
    if marks and len(marks) != layers:
        raise fields.refuse(name, f"is not 0 or 1 for each layer of num_hidden_layers {layers}")
    return marks
