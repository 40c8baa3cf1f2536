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
from typing import Literal

from afserve.config_json import Config, ConfigFields
from afserve.errors import CheckpointError, ConfigError
from afserve.spec_parts import AttentionSpec, MoeSpec, RopeSpec

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
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file; a model is a folder with a config.json") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path}: a JSON object was expected, found {type(config).__name__}")
        return cls.from_config(config, where=str(path))

    @classmethod
    def from_config(cls, config: Config, where: str = "config.json") -> "ModelSpec":
        family = str(config.get("model_type", ""))
        if family not in _READERS:
            raise CheckpointError(
                f"{where}: model_type {family or 'missing'!r} is not supported; supported: {', '.join(_READERS)}"
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

    def weight_bytes(self, role: Literal["attention", "expert", "colocated"], dtype: str = "auto") -> int:
        """Bytes of all weights of a role together, were it one node."""
        size = BYTES[self.dtype if dtype == "auto" else dtype]
        expert = self.routed_parameters() * size
        attention = self.attention_parameters() * size
        return {"attention": attention, "expert": expert, "colocated": attention + expert}[role]

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
            f"{fields.where}: rope_type {kind!r} is not supported; supported: default, linear, yarn"
        )
    longest = fields.integer("max_position_embeddings", low=1)
    original = inner.integer("original_max_position_embeddings", default=longest, low=1)
    return RopeSpec(
        kind,
        theta,
        dim,
        interleaved,
        factor=inner.number("factor", default=longest / original),
        original_max=original,
        beta_fast=inner.number("beta_fast", default=32.0) or 32.0,
        beta_slow=inner.number("beta_slow", default=1.0) or 1.0,
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
            f"{fields.where}: quantization_config: method {quant.get('quant_method')!r} is not supported; "
            "supported: fp8 with weight_block_size"
        )
    block = quant.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise CheckpointError(
            f"{fields.where}: quantization_config.weight_block_size: {block!r} is not two sizes"
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
    if not moe_ids:
        raise CheckpointError(
            f"{fields.where}: no MoE layer at all; afserve serves Mixture-of-Experts models"
        )
    if moe.top_k > moe.experts:
        raise fields.refuse("num_experts_per_tok", f"is more than the {moe.experts} experts")
    dtype = str(fields.config.get("dtype") or fields.config.get("torch_dtype") or "float32")
    if dtype not in BYTES:
        raise CheckpointError(f"{fields.where}: dtype: {dtype!r} is not one of {', '.join(BYTES)}")
    return ModelSpec(
        family=str(fields.config["model_type"]),
        hidden=fields.integer("hidden_size", low=1),
        layers=fields.integer("num_hidden_layers", low=1),
        vocab_size=fields.integer("vocab_size", low=1),
        max_position=fields.integer("max_position_embeddings", low=1),
        eps=fields.number("rms_norm_eps", default=1e-6),
        dense_inner=dense,
        tied=fields.flag("tie_word_embeddings", False),
        dtype=dtype,
        fp8_block=_fp8_block(fields),
        attention=attention,
        rope=rope,
        moe=moe,
        moe_layer_ids=moe_ids,
        bos_ids=fields.token_ids("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
    )


def _mla(fields: ConfigFields) -> AttentionSpec:
    nope, rope = fields.integer("qk_nope_head_dim", low=1), fields.integer("qk_rope_head_dim", low=2)
    return AttentionSpec(
        kind="mla",
        heads=fields.integer("num_attention_heads", low=1),
        kv_heads=1,
        head_dim=nope + rope,
        value_dim=fields.integer("v_head_dim", low=1),
        bias=fields.flag("attention_bias", False),
        q_lora_rank=fields.optional("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank", low=1),
        nope_dim=nope,
        rope_dim=rope,
    )


def _dense_then_moe(fields: ConfigFields, default: int) -> tuple[int, ...]:
    first = fields.integer("first_k_dense_replace", default=default)
    return tuple(range(first, fields.integer("num_hidden_layers", low=1)))


def _shared_inner(fields: ConfigFields) -> int:
    return fields.integer("moe_intermediate_size", low=1) * (fields.optional("n_shared_experts") or 0)


def _deepseek_v3(fields: ConfigFields) -> ModelSpec:
    attention = _mla(fields)
    moe = MoeSpec(
        experts=fields.integer("n_routed_experts", "num_local_experts", low=1),
        top_k=fields.integer("num_experts_per_tok", low=1),
        inner=fields.integer("moe_intermediate_size", low=1),
        shared_inner=_shared_inner(fields),
        scoring="sigmoid",
        selection="group_top2_sum",
        groups=fields.integer("n_group", default=1, low=1),
        top_groups=fields.integer("topk_group", default=1, low=1),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction_bias=True,
    )
    _check_groups(fields, moe, least=2)
    rope = _rope(fields, attention.rope_dim, fields.flag("rope_interleave", True), 10000.0)
    dense = fields.integer("intermediate_size", low=1)
    return _model(fields, attention, rope, moe, _dense_then_moe(fields, 3), dense)


def _deepseek_v2(fields: ConfigFields) -> ModelSpec:
    attention = _mla(fields)
    method = fields.config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse("topk_method", "is not supported; supported: greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    moe = MoeSpec(
        experts=fields.integer("n_routed_experts", "num_experts", "num_local_experts", low=1),
        top_k=fields.integer("num_experts_per_tok", low=1),
        inner=fields.integer("moe_intermediate_size", low=1),
        shared_inner=_shared_inner(fields),
        scoring="softmax",
        selection="group_max" if grouped else "plain",
        groups=fields.integer("n_group", low=1) if grouped else 1,
        top_groups=fields.integer("topk_group", low=1) if grouped else 1,
        scale=fields.number("routed_scaling_factor", default=1.0),
        closed_to_zero=True,
    )
    _check_groups(fields, moe, least=1)
    rope = _rope(fields, attention.rope_dim, True, 10000.0)
    dense = fields.integer("intermediate_size", low=1)
    return _model(fields, attention, rope, moe, _dense_then_moe(fields, 0), dense)


def _check_groups(fields: ConfigFields, moe: MoeSpec, least: int) -> None:
    if moe.experts % moe.groups:
        raise fields.refuse("n_group", f"does not divide the {moe.experts} experts")
    if moe.groups > 1 and moe.experts // moe.groups < least:
        raise fields.refuse("n_group", f"leaves fewer than {least} experts in a group")
    if moe.top_groups > moe.groups:
        raise fields.refuse("topk_group", f"is more than the {moe.groups} groups")
    if moe.top_groups * (moe.experts // moe.groups) < moe.top_k:
        raise fields.refuse("topk_group", f"leaves fewer than {moe.top_k} experts to choose from")


def _gqa(fields: ConfigFields, *, qk_norm: bool, bias: bool, window: int | None) -> AttentionSpec:
    heads = fields.integer("num_attention_heads", low=1)
    kv_heads = fields.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"does not divide the {heads} attention heads")
    head_dim = fields.optional("head_dim") or fields.integer("hidden_size", low=1) // heads
    return AttentionSpec(
        "gqa", heads, kv_heads, head_dim, head_dim, bias=bias, qk_norm=qk_norm, window=window
    )


def _qwen3_moe(fields: ConfigFields) -> ModelSpec:
    window = fields.optional("sliding_window") if fields.flag("use_sliding_window", False) else None
    attention = _gqa(fields, qk_norm=True, bias=fields.flag("attention_bias", False), window=window)
    step = fields.integer("decoder_sparse_step", default=1, low=1)
    raw = fields.config.get("mlp_only_layers") or []
    if not isinstance(raw, list) or not all(isinstance(i, int) for i in raw):
        raise fields.refuse("mlp_only_layers", "is not a list of layer numbers")
    ids = tuple(
        i for i in range(fields.integer("num_hidden_layers", low=1)) if i not in raw and (i + 1) % step == 0
    )
    moe = MoeSpec(
        experts=fields.integer("num_experts", "num_local_experts", low=1),
        top_k=fields.integer("num_experts_per_tok", low=1),
        inner=fields.integer("moe_intermediate_size", low=1),
        shared_inner=0,
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
    )
    rope = _rope(fields, attention.head_dim, False, 10000.0)
    return _model(fields, attention, rope, moe, ids, fields.integer("intermediate_size", default=0))


def _mixtral(fields: ConfigFields) -> ModelSpec:
    attention = _gqa(fields, qk_norm=False, bias=False, window=fields.optional("sliding_window"))
    moe = MoeSpec(
        experts=fields.integer("num_local_experts", "num_experts", low=1),
        top_k=fields.integer("num_experts_per_tok", low=1),
        inner=fields.integer("intermediate_size", low=1),
        shared_inner=0,
        scoring="softmax",
        renormalise=True,
    )
    rope = _rope(fields, attention.head_dim, False, 1e6)
    return _model(fields, attention, rope, moe, tuple(range(fields.integer("num_hidden_layers", low=1))), 0)


_READERS: dict[str, Callable[[ConfigFields], ModelSpec]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}
FAMILIES = tuple(_READERS)
