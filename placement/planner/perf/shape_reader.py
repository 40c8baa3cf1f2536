"""From a Hugging Face `config.json` (already parsed) to a `ModelShape`, for more families than afserve serves.

Where the engine serves the family, its own file in `afserve/families` reads the layers. Otherwise they are read by the
names that dimensions usually have. It reads no files.
"""

from collections.abc import Mapping

from afserve.config_json import ConfigFields
from afserve.errors import ConfigError
from afserve.families.reading.planned import flat_fields
from afserve.families.table import encoder_of, layers_of, table_of
from afserve.placement.planner.perf.shape import ExpertLayers, ModelShape
from afserve.placement.planner.perf.shape_attention import attention_layers
from afserve.spec_parts import DenseSpec, projections_of


def shape_from_config(name: str, config: Mapping[str, object], source: str = "") -> ModelShape:
    """Raises ConfigError naming `source` and the missing or odd field. `name` is what tables show."""
    where = source or f"model {name}"
    fields = flat_fields(config, where, ConfigError)
    hidden = fields.integer("hidden_size")
    layers = layers_of(fields)
    routed = [layer.moe for layer in layers if layer.moe]
    dense = [layer.ffn for layer in layers if isinstance(layer.ffn, DenseSpec) and layer.ffn.inner]
    moe, attention = routed[0], (layer.attention for layer in layers if layer.attention.kind != "none")
    maps = projections_of(moe.activation)
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=fields.integer("vocab_size"),
        attention=attention_layers(attention, hidden),
        experts=ExpertLayers(
            layers=len(routed),
            experts=moe.experts,
            top_k=moe.expected_sent,
            elems=maps * moe.width(hidden) * moe.inner,
            shared_elems=maps * hidden * moe.shared_inner,
            row=moe.latent,
            latent_elems=2 * hidden * moe.latent,
            zero_experts=moe.zero_experts,
        ),
        dense_layers=len(dense),
        dense_elems=projections_of(dense[0].activation) * hidden * dense[0].inner if dense else 0,
        mtp_layers=fields.optional("num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
        source=str(config.get("_source", "")),
        table_elems=table.rows * table.width if (table := table_of(fields)) else 0,
        encoder=encoder_of(ConfigFields(config, where, ConfigError)),
    )
