"""The parts of a model's shape: rotary embedding, attention, routed experts. Plain numbers; read by `spec.py`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `kind` is "default", "linear" or "yarn"; the rest of the fields are yarn's."""

    kind: str
    theta: float
    dim: int
    interleaved: bool
    factor: float = 1.0
    original_max: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """GQA (`kind` "gqa") or multi-head latent attention (`kind` "mla"); sizes are per head.

    For MLA `head_dim` is nope + rope and `kv_heads` 1. `window` counts the token itself, None = full.
    """

    kind: Literal["gqa", "mla"]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0

    @property
    def kv_width(self) -> int:
        """Cached numbers per token and layer."""
        if self.kind == "mla":
            return self.kv_lora_rank + self.rope_dim
        return self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts of one MoE layer. `scoring` and `selection` are names of kernels/routing.py's enums."""

    experts: int
    top_k: int
    inner: int
    shared_inner: int
    scoring: str
    selection: str = "plain"
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    closed_to_zero: bool = False
    correction_bias: bool = False
