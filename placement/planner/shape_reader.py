"""From a Hugging Face `config.json` (already parsed) to a `ModelShape`, for more families than afserve serves.

Only dimensions are read, so a new family works when its field names are among the ones below. Reads no files.
"""

from collections.abc import Mapping

from afserve.config_ranges import RANGES
from afserve.errors import ConfigError
from afserve.placement.planner.fields import Fields
from afserve.placement.planner.shape import ExpertLayers, ModelShape
from afserve.placement.planner.shape_attention import attention_layers

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token")
_WIDTH = ("moe_intermediate_size", "ffn_hidden_size", "intermediate_size")
_WHICH_LAYERS = (
    "num_hidden_layers",
    "n_layers",
    "moe_layers_enum",
    "interleave_moe_layer_step",
    "first_k_dense_replace",
    "mlp_only_layers",
)
_DENSE_WIDTH = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")


def shape_from_config(name: str, config: Mapping[str, object], source: str = "") -> ModelShape:
    """Raises ConfigError naming `source` and the missing or odd field. `name` is what tables show."""
    source = source or f"model {name}"
    fields = Fields(source, _flatten(source, config), RANGES)
    layers = fields.integer(_present(fields, ("num_hidden_layers", "n_layers")), least=1)
    hidden = fields.integer("hidden_size", least=1)
    moe_layers = _moe_layer_count(fields, layers)
    width = fields.integer(_present(fields, _WIDTH), least=1)
    routed, top_k = _present(fields, _EXPERTS), _present(fields, _TOP_K)
    experts = fields.integer(routed, least=1)
    if fields.integer(top_k, least=1) > experts:
        raise fields.refuse(top_k, f"must be at most the {experts} of {routed}")
    dense = layers - moe_layers
    dense_width = fields.integer(_present(fields, _DENSE_WIDTH), width) if dense else 0
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=fields.integer("vocab_size", least=1),
        attention=attention_layers(fields, layers),
        experts=ExpertLayers(
            layers=moe_layers,
            experts=experts,
            top_k=fields.integer(top_k),
            elems=3 * hidden * width,
            shared_elems=3 * hidden * _shared_width(fields, width),
        ),
        dense_layers=dense,
        dense_elems=3 * hidden * dense_width,
        mtp_layers=fields.integer("num_nextn_predict_layers", 0),
        source=str(config.get("_source", "")),
    )


def _flatten(source: str, config: Mapping[str, object]) -> dict[str, object]:
    """One level: a vision model's `text_config`, DBRX's `attn_config` and `ffn_config`, and DBRX's own names."""
    flat = dict(config)
    for key in ("text_config", "attn_config", "ffn_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            flat.update(inner)
        elif inner is not None:
            raise Fields(source, config).refuse(key, "must be an object")
    renames = {
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "kv_n_heads": "num_key_value_heads",
    }
    for old, new in renames.items():
        if old in flat and flat.get(new) is None:
            flat[new] = flat[old]
    return flat


def _present(fields: Fields, names: tuple[str, ...]) -> str:
    found = next((name for name in names if fields.has(name)), None)
    if found is None:
        raise ConfigError(
            f"{fields.source}: none of {', '.join(names)} is there. The planner needs a Mixture-of-Experts config.json",
            param=names[0],
        )
    return found


def _moe_layer_count(fields: Fields, layers: int) -> int:
    found = _counted_moe_layers(fields, layers)
    if not 1 <= found <= layers:
        names = ", ".join(name for name in _WHICH_LAYERS if fields.has(name))
        raise ConfigError(
            f"{fields.source}: {names} leave {found} of {layers} layers with experts", param=names
        )
    return found


def _counted_moe_layers(fields: Fields, layers: int) -> int:
    enumerated = fields.table.get("moe_layers_enum")
    if isinstance(enumerated, str):
        return len([part for part in enumerated.split(",") if part.strip()])
    if fields.items("moe_layers_enum"):
        return len(fields.items("moe_layers_enum"))
    if fields.has("interleave_moe_layer_step"):
        return layers // fields.integer("interleave_moe_layer_step", least=1)
    listed = len(fields.items("mlp_only_layers"))
    return layers - fields.integer("first_k_dense_replace", 0) - listed


def _shared_width(fields: Fields, width: int) -> int:
    """The shared expert's intermediate size; 0 without one. Llama 4 has one of the routed experts' width."""
    for key in ("shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size"):
        if fields.has(key):
            return fields.integer(key)
    if fields.has("interleave_moe_layer_step"):
        return width
    return width * fields.integer("n_shared_experts", 0)
