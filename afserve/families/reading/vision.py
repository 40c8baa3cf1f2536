"""The encoder of pictures beside a text model, from the section `vision_config` of a config.json."""

import math

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT, MOST_LAYERS, Range
from afserve.tiles import EncoderSpec, TiledEncoderSpec, WholeEncoderSpec

Numbers = tuple[int, ...]


def tile_encoder(fields: ConfigFields) -> TiledEncoderSpec | None:
    """Llama 4's; None where config.json has no such section, so that the checkpoint reads text alone."""
    if not fields.has("vision_config"):
        return None
    own = fields.inner(fields.section("vision_config"), "vision_config")
    own.known_only("hidden_act", "gelu")
    own.known_only("num_channels", 3)
    own.known_only("pixel_shuffle_ratio", 0.5)
    own.known_only("multi_modal_projector_bias", False)
    spec = TiledEncoderSpec(
        token=fields.integer("image_token_index", "image_token_id", default=200092),
        side=own.integer("image_size", default=448),
        patch=own.integer("patch_size", default=14),
        hidden=own.integer("hidden_size", default=768),
        layers=own.integer("num_hidden_layers", default=34),
        heads=own.integer("num_attention_heads", default=16),
        inner=own.integer("intermediate_size", default=5632),
        join=2,
        theta=_theta(own),
        out=own.integer("projector_output_dim", default=4096),
    )
    _check_both(spec, own, fields, "image_token_index", "num_attention_heads")
    _check_tiles(spec, own)
    return spec


def whole_encoder(fields: ConfigFields) -> WholeEncoderSpec | None:
    """Qwen3.5's; None as above."""
    return _whole(fields, (11, 11, 10), ())


def deep_encoder(fields: ConfigFields) -> WholeEncoderSpec | None:
    """Qwen3-VL's."""
    return _whole(fields, (24, 20, 20), (8, 16, 24))


def _whole(fields: ConfigFields, sections: Numbers, deep: Numbers) -> WholeEncoderSpec | None:
    """With these where config.json says nothing."""
    if not fields.has("vision_config"):
        return None
    own = fields.inner(fields.section("vision_config"), "vision_config")
    own.known_only("hidden_act", "gelu_pytorch_tanh")
    own.known_only("in_channels", 3)
    if not deep:
        own.known_only("deepstack_visual_indexes", [])
    if own.integer("out_hidden_size", default=3584) != fields.integer("hidden_size"):
        raise own.refuse("out_hidden_size", "is not the text model's hidden_size")
    places = own.integer("num_position_embeddings", default=2304)
    spec = WholeEncoderSpec(
        token=fields.integer("image_token_id", default=248056),
        patch=own.integer("patch_size", default=16),
        hidden=own.integer("hidden_size", default=1152),
        layers=own.integer("depth", default=27),
        heads=own.integer("num_heads", default=16),
        inner=own.integer("intermediate_size", default=4304),
        join=own.integer("spatial_merge_size", default=2),
        theta=_theta(own),
        places=math.isqrt(places),
        frames=own.integer("temporal_patch_size", default=2),
        sections=_sections(fields) or sections,
        deep=_deep(own) if own.has("deepstack_visual_indexes") else deep,
    )
    if len(spec.deep) >= fields.integer("num_hidden_layers") or any(at >= spec.layers for at in spec.deep):
        raise own.refuse("deepstack_visual_indexes", "are more than the layers of one of both models")
    _check_both(spec, own, fields, "image_token_id", "num_heads")
    if spec.places**2 != places:
        raise own.refuse("num_position_embeddings", "is not a square")
    return spec


def _sections(fields: ConfigFields) -> Numbers:
    raw = {**fields.section("rope_scaling"), **fields.section("rope_parameters")}
    rope = fields.inner(raw, "rope_parameters")
    rope.known_only("mrope_interleaved", True)
    found = rope.integers("mrope_section", Range(0, 1 << 10), 3)
    if found and len(found) != 3:
        raise rope.refuse("mrope_section", "is not three numbers")
    return found


def _deep(own: ConfigFields) -> Numbers:
    return own.integers("deepstack_visual_indexes", LAYER_COUNT, MOST_LAYERS)


def _theta(own: ConfigFields) -> float:
    rope = own.inner(own.section("rope_parameters") or own.config, "rope_parameters")
    return rope.number("rope_theta", default=10000.0)


def _check_both(spec: EncoderSpec, own: ConfigFields, fields: ConfigFields, token: str, heads: str) -> None:
    if spec.token >= fields.integer("vocab_size"):
        raise fields.refuse(token, "is not below vocab_size")
    if spec.hidden % (4 * spec.heads):
        raise own.error(
            f"hidden_size: {spec.hidden} is not a multiple of 4 * {heads} {spec.heads}", "hidden_size"
        )


def _check_tiles(spec: TiledEncoderSpec, own: ConfigFields) -> None:
    """Numbers that have to fit each other."""
    if spec.side % spec.step:
        raise own.error(
            f"image_size: {spec.side} is not a multiple of {spec.join} * patch_size {spec.patch}",
            "image_size",
        )
    if spec.inner != spec.hidden * spec.join**2:
        raise own.error(
            f"intermediate_size: {spec.inner} is not {spec.join**2} times hidden_size {spec.hidden}",
            "intermediate_size",
        )
    for name in ("projector_input_dim", "vision_output_dim"):
        if own.integer(name, default=spec.out) != spec.out:
            raise own.refuse(name, f"is not projector_output_dim {spec.out}")
