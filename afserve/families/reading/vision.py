"""The encoder of pictures beside a text model, from the section `vision_config` of a config.json."""

from afserve.config_json import ConfigFields
from afserve.tiles import EncoderSpec


def tile_encoder(fields: ConfigFields) -> EncoderSpec | None:
    """Llama 4's; None where config.json has no such section, so that the checkpoint reads text alone."""
    if not fields.has("vision_config"):
        return None
    own = fields.inner(fields.section("vision_config"), "vision_config")
    own.known_only("hidden_act", "gelu")
    own.known_only("num_channels", 3)
    own.known_only("pixel_shuffle_ratio", 0.5)
    own.known_only("multi_modal_projector_bias", False)
    rope = own.inner(own.section("rope_parameters") or own.config, "rope_parameters")
    spec = EncoderSpec(
        token=fields.integer("image_token_index", "image_token_id", default=200092),
        side=own.integer("image_size", default=448),
        patch=own.integer("patch_size", default=14),
        hidden=own.integer("hidden_size", default=768),
        layers=own.integer("num_hidden_layers", default=34),
        heads=own.integer("num_attention_heads", default=16),
        inner=own.integer("intermediate_size", default=5632),
        join=2,
        out=own.integer("projector_output_dim", default=4096),
        theta=rope.number("rope_theta", default=10000.0),
    )
    _check(spec, own, fields)
    return spec


def _check(spec: EncoderSpec, own: ConfigFields, fields: ConfigFields) -> None:
    """Numbers that have to fit each other."""
    if spec.token >= fields.integer("vocab_size"):
        raise fields.refuse("image_token_index", "is not below vocab_size")
    if spec.side % (spec.patch * spec.join):
        raise own.error(
            f"image_size: {spec.side} is not a multiple of {spec.join} * patch_size {spec.patch}",
            "image_size",
        )
    if spec.hidden % (4 * spec.heads):
        raise own.error(
            f"hidden_size: {spec.hidden} is not a multiple of 4 * num_attention_heads {spec.heads}",
            "hidden_size",
        )
    if spec.inner != spec.hidden * spec.join**2:
        raise own.error(
            f"intermediate_size: {spec.inner} is not {spec.join**2} times hidden_size {spec.hidden}",
            "intermediate_size",
        )
    for name in ("projector_input_dim", "vision_output_dim"):
        if own.integer(name, default=spec.out) != spec.out:
            raise own.refuse(name, f"is not projector_output_dim {spec.out}")
