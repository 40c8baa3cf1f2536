"""A model's shape, read from a Hugging Face `config.json`: plain numbers, no torch, no weights.

Everything that sizes memory, batches or messages starts here. It does not know the names of tensors; those
are in `models/`. Field meanings follow transformers' configuration classes of the same `model_type`.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from afserve.config_json import Config, ConfigFields
from afserve.config_ranges import LAYER_COUNT, MOST_LAYERS, MOST_ROUTED, Range
from afserve.errors import CheckpointError, ConfigError, shown
from afserve.json_file import read_object
from afserve.spec_parts import AttentionSpec, MoeSpec, RopeSpec

_BLOCK = Range(1, 1 << 16)
_EXPERT_FIELDS = "n_routed_experts, num_experts or num_local_experts"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ModelSpec:
    """One model. `moe_layer_ids` are the decoder layers whose FFN is routed; the others are dense."""

    family: str
    hidden: int
    layers: int
    vocab_size: int
    max_position: int
    eps: float
    dense_inner: int
    tied: bool
    dtype: str
    fp8_block: tuple[int, int] | None
    attention: AttentionSpec
    rope: RopeSpec
    moe: MoeSpec
    moe_layer_ids: tuple[int, ...]
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: str | Path) -> "ModelSpec":
        """From `folder/config.json`. Raises CheckpointError naming the file and the field."""
        path = Path(folder) / "config.json"
        if not path.exists():
            raise CheckpointError(f"{path}: no such file; a model is a folder with a config.json")
        return cls.from_config(read_object(path), where=str(path))

    @classmethod
    def from_config(cls, config: Config, where: str = "config.json") -> "ModelSpec":
        family = config.get("model_type")
        if not isinstance(family, str) or family not in _READERS:
            known = ", ".join(_READERS)
            raise CheckpointError(
                f"{where}: model_type {shown(family or 'missing')} is not supported; supported: {known}"
            )
        return _READERS[family](ConfigFields(config, where))

    @property
    def experts(self) -> int:
        return self.moe.experts

    @property
    def top_k(self) -> int:
        return self.moe.top_k

    @property
    def moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @cached_property
    def moe_index(self) -> dict[int, int]:
        """Decoder layer -> its number among the MoE layers."""
        return {layer: number for number, layer in enumerate(self.moe_layer_ids)}

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        return self.layers * self.attention.kv_width * dtype_bytes

    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.hidden * self.moe.inner

    def routed_parameters(self) -> int:
        return self.moe_layers * self.experts * self.expert_parameters()

    def attention_parameters(self) -> int:
        """Everything but the routed experts: attention, routers, shared and dense FFNs, embeddings."""
        a, h = self.attention, self.hidden
        if a.kind == "mla":
            q_in = a.q_lora_rank or h
            per_layer = (
                (h * a.q_lora_rank if a.q_lora_rank else 0)
                + q_in * a.heads * a.head_dim
                + h * (a.kv_lora_rank + a.rope_dim)
                + a.kv_lora_rank * a.heads * (a.nope_dim + a.value_dim)
                + a.heads * a.value_dim * h
            )
        else:
            per_layer = h * (2 * a.heads * a.head_dim + 2 * a.kv_heads * a.head_dim)
        moe = self.moe_layers * (self.experts * h + 3 * h * self.moe.shared_inner)
        dense = (self.layers - self.moe_layers) * 3 * h * self.dense_inner
        embeddings = self.vocab_size * h * (1 if self.tied else 2)
        return self.layers * (per_layer + 2 * h) + moe + dense + embeddings + h

    def cut(self, layers: int) -> "ModelSpec":
        """The first `layers` layers of this model; at least one MoE layer must remain."""
        ids = tuple(i for i in self.moe_layer_ids if i < layers)
        if not ids:
            raise ConfigError(
                f"layers: {layers} leaves no MoE layer of {self.family}; the first is layer {self.moe_layer_ids[0]}, "
                f"so use at least {self.moe_layer_ids[0] + 1}"
            )
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ModelSpec(**{**values, "layers": min(layers, self.layers), "moe_layer_ids": ids})

    def fingerprint(self) -> str:
        """Hex digest of the whole shape; equal on every node that serves the same model."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def _rope(fields: ConfigFields, dim: int, interleaved: bool, theta: float) -> RopeSpec:
    raw = {**fields.section("rope_scaling"), **fields.section("rope_parameters")}
    inner = ConfigFields({k: v for k, v in raw.items() if v is not None}, f"{fields.where}: rope_parameters")
    kind = str(inner.config.get("rope_type", inner.config.get("type", "default")))
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=theta))
    if kind == "default":
        return RopeSpec("default", theta, dim, interleaved)
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{fields.where}: rope_type {shown(kind)} is not supported; supported: default, linear, yarn"
        )
    longest = fields.integer("max_position_embeddings")
    original = inner.integer("original_max_position_embeddings", default=longest)
    return RopeSpec(
        kind,
        theta,
        dim,
        interleaved,
        factor=inner.number("factor", default=longest / original),
        original_max=original,
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        attention_factor=inner.number("attention_factor") if "attention_factor" in inner.config else None,
        mscale=inner.number("mscale", default=0.0),
        mscale_all_dim=inner.number("mscale_all_dim", default=0.0),
        truncate=inner.flag("truncate", True),
    )


def _fp8_block(fields: ConfigFields) -> tuple[int, int] | None:
    quant = fields.section("quantization_config")
    if not quant:
        return None
    if quant.get("quant_method") != "fp8":
        raise CheckpointError(
            f"{fields.where}: quantization_config: method {shown(quant.get('quant_method'))} is not supported; "
            "supported: fp8 with weight_block_size"
        )
    block = quant.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(map(_BLOCK.holds, block))):
        raise CheckpointError(
            f"{fields.where}: quantization_config.weight_block_size: {shown(block)} is not two sizes, each {_BLOCK}"
        )
    return block[0], block[1]


def _model(
    fields: ConfigFields,
    attention: AttentionSpec,
    rope: RopeSpec,
    moe: MoeSpec,
    moe_ids: tuple[int, ...],
    dense: int,
) -> ModelSpec:
    act = fields.config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "is not supported; supported: silu")
    layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    _check_layers(fields, moe, moe_ids, layers, dense)
    dtype = str(fields.config.get("dtype") or fields.config.get("torch_dtype") or "float32")
    if dtype not in BYTES:
        raise CheckpointError(f"{fields.where}: dtype: {shown(dtype)} is not one of {', '.join(BYTES)}")
    return ModelSpec(
        family=str(fields.config["model_type"]),
        hidden=fields.integer("hidden_size"),
        layers=layers,
        vocab_size=vocab_size,
        max_position=fields.integer("max_position_embeddings"),
        eps=fields.number("rms_norm_eps", default=1e-6),
        dense_inner=dense,
        tied=fields.flag("tie_word_embeddings", False),
        dtype=dtype,
        fp8_block=_fp8_block(fields),
        attention=attention,
        rope=rope,
        moe=moe,
        moe_layer_ids=moe_ids,
        bos_ids=fields.token_ids("bos_token_id", vocab_size),
        eos_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def _check_layers(
    fields: ConfigFields, moe: MoeSpec, moe_ids: tuple[int, ...], layers: int, dense: int
) -> None:
    if not moe_ids:
        raise CheckpointError(
            f"{fields.where}: no MoE layer at all is left of num_hidden_layers {layers} by first_k_dense_replace, "
            "mlp_only_layers or decoder_sparse_step; afserve serves Mixture-of-Experts models"
        )
    if len(moe_ids) < layers and not dense:
        raise CheckpointError(f"{fields.where}: intermediate_size: missing, for layers without experts")
    if len(moe_ids) * moe.experts > MOST_ROUTED:
        raise CheckpointError(
            f"{fields.where}: num_hidden_layers, {_EXPERT_FIELDS}: {len(moe_ids)} layers of {moe.experts} experts "
            f"have more than the {MOST_ROUTED} that afserve can place"
        )
    if moe.top_k > moe.experts:
        raise fields.refuse("num_experts_per_tok", f"is more than the {moe.experts} of {_EXPERT_FIELDS}")


def _mla(fields: ConfigFields) -> AttentionSpec:
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if rope % 2:
        raise fields.refuse("qk_rope_head_dim", "is odd; rotary embedding turns pairs")
    return AttentionSpec(
        kind="mla",
        heads=fields.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=nope + rope,
        value_dim=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias", False),
        q_lora_rank=fields.optional("q_lora_rank") or None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
    )


def _dense_then_moe(fields: ConfigFields, default: int) -> tuple[int, ...]:
    first = fields.integer("first_k_dense_replace", default=default)
    return tuple(range(first, fields.integer("num_hidden_layers")))


def _shared_inner(fields: ConfigFields) -> int:
    return fields.integer("moe_intermediate_size") * (fields.optional("n_shared_experts") or 0)


def _deepseek_v3(fields: ConfigFields) -> ModelSpec:
    attention = _mla(fields)
    moe = MoeSpec(
        experts=fields.integer("n_routed_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("moe_intermediate_size"),
        shared_inner=_shared_inner(fields),
        scoring="sigmoid",
        selection="group_top2_sum",
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction_bias=True,
    )
    _check_groups(fields, moe, least=2)
    rope = _rope(fields, attention.rope_dim, fields.flag("rope_interleave", True), 10000.0)
    dense = fields.integer("intermediate_size")
    return _model(fields, attention, rope, moe, _dense_then_moe(fields, 3), dense)


def _deepseek_v2(fields: ConfigFields) -> ModelSpec:
    attention = _mla(fields)
    method = fields.config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse("topk_method", "is not supported; supported: greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    moe = MoeSpec(
        experts=fields.integer("n_routed_experts", "num_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("moe_intermediate_size"),
        shared_inner=_shared_inner(fields),
        scoring="softmax",
        selection="group_max" if grouped else "plain",
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
        scale=fields.number("routed_scaling_factor", default=1.0),
        closed_to_zero=True,
    )
    _check_groups(fields, moe, least=1)
    rope = _rope(fields, attention.rope_dim, True, 10000.0)
    dense = fields.integer("intermediate_size")
    return _model(fields, attention, rope, moe, _dense_then_moe(fields, 0), dense)


def _check_groups(fields: ConfigFields, moe: MoeSpec, least: int) -> None:
    if moe.experts % moe.groups:
        raise fields.refuse("n_group", f"does not divide the {moe.experts} experts of {_EXPERT_FIELDS}")
    if moe.groups > 1 and moe.experts // moe.groups < least:
        raise fields.refuse("n_group", f"leaves fewer than {least} of {_EXPERT_FIELDS} in a group")
    if moe.top_groups > moe.groups:
        raise fields.refuse("topk_group", f"is more than the {moe.groups} groups of n_group")
    left = moe.top_groups * (moe.experts // moe.groups)
    if left < moe.top_k:
        raise fields.refuse(
            "topk_group",
            f"of n_group leave {left} of {_EXPERT_FIELDS}, fewer than num_experts_per_tok {moe.top_k}",
        )


def _gqa(fields: ConfigFields, *, qk_norm: bool, bias: bool, window: int | None) -> AttentionSpec:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"does not divide the {heads} of num_attention_heads")
    head_dim = fields.optional("head_dim") or fields.integer("hidden_size") // heads
    if not head_dim or head_dim % 2:
        raise CheckpointError(
            f"{fields.where}: head_dim, or hidden_size over num_attention_heads: {head_dim} is not an even size of at "
            "least 2; rotary embedding turns pairs"
        )
    return AttentionSpec(
        "gqa", heads, kv_heads, head_dim, head_dim, bias=bias, qk_norm=qk_norm, window=window
    )


def _qwen3_moe(fields: ConfigFields) -> ModelSpec:
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", False) else None
    attention = _gqa(fields, qk_norm=True, bias=fields.flag("attention_bias", False), window=window)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = frozenset(fields.integers("mlp_only_layers", LAYER_COUNT, MOST_LAYERS))
    layers = range(fields.integer("num_hidden_layers"))
    ids = tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
    moe = MoeSpec(
        experts=fields.integer("num_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("moe_intermediate_size"),
        shared_inner=0,
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
    )
    rope = _rope(fields, attention.head_dim, False, 10000.0)
    return _model(fields, attention, rope, moe, ids, fields.optional("intermediate_size") or 0)


def _mixtral(fields: ConfigFields) -> ModelSpec:
    attention = _gqa(fields, qk_norm=False, bias=False, window=fields.optional("sliding_window"))
    moe = MoeSpec(
        experts=fields.integer("num_local_experts", "num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("intermediate_size"),
        shared_inner=0,
        scoring="softmax",
        renormalise=True,
    )
    rope = _rope(fields, attention.head_dim, False, 1e6)
    return _model(fields, attention, rope, moe, tuple(range(fields.integer("num_hidden_layers"))), 0)


_READERS: dict[str, Callable[[ConfigFields], ModelSpec]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}
FAMILIES = tuple(_READERS)
