"""What a family's file provides: how its layers follow from a config.json, and what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from afserve.config_json import Config, ConfigFields
from afserve.families.pattern.naming import Naming
from afserve.spec_parts import Around, LayerSpec, TableSpec
from afserve.tiles import EncoderSpec


def layer_count(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers")


def plain(fields: ConfigFields) -> Around:
    """RMS norms, and nothing but embedding and head around the layers."""
    return Around()


def no_table(fields: ConfigFields) -> TableSpec | None:
    return None


def no_encoder(fields: ConfigFields) -> EncoderSpec | None:
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """`layers` reads every decoder layer, the first one first. Its refusals name the field of config.json.

    Fields of `sections` are read as if they were not in a section, those of `renames` (old, new) by both names;
    `defaults` are for fields that are absent. `count` is asked first, so that a wrong number of layers is what is told.
    """

    layers: Callable[[ConfigFields], tuple[LayerSpec, ...]]
    naming: Naming
    around: Callable[[ConfigFields], Around] = plain
    sections: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    count: Callable[[ConfigFields], int] = layer_count
    table: Callable[[ConfigFields], TableSpec | None] = no_table
    encoder: Callable[[ConfigFields], EncoderSpec | None] = no_encoder

    def config_view(self, fields: ConfigFields) -> ConfigFields:
        """The config as `layers` and `around` read it. What is not in a section counts more than what is."""
        flat = dict(self.defaults)
        for section in self.sections:
            flat.update(given(fields.section(section)))
        flat.update(given(fields.config))
        called = {new: old for old, new in self.renames if new not in given(fields.config)}
        flat.update((new, flat[old]) for new, old in called.items() if old in flat)
        return ConfigFields(flat, fields.where, fields.refusal, {**fields.called, **called})

    def read(self, fields: ConfigFields) -> tuple[LayerSpec, ...]:
        """The layers of a view; how many there are is asked first."""
        self.count(fields)
        return self.layers(fields)


def beside_vision(text: Family, stem: str, head: str = "lm_head.weight") -> Family:
    """A family as the text part of a checkpoint: its config.json is a section, its tensors are below `stem`."""
    return replace(text, naming=replace(text.naming, stem=stem, head=head), sections=("text_config",))


def given(config: Config) -> dict[str, object]:
    """Without what is null."""
    return {name: value for name, value in config.items() if value is not None}
