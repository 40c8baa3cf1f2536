"""What a family's file provides: how its layers follow from a config.json, and what its tensors are called."""

from collections.abc import Callable
from dataclasses import dataclass

from afserve.config_json import ConfigFields
from afserve.families.naming import Naming
from afserve.spec_parts import LayerSpec


@dataclass(frozen=True, slots=True)
class Family:
    """`layers` reads every decoder layer, the first one first. Its refusals name the field of config.json."""

    layers: Callable[[ConfigFields], tuple[LayerSpec, ...]]
    naming: Naming
