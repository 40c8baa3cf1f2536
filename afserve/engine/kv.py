"""The KV cache's memory: one set of paged tensors per layer, allocated once.

GQA keeps keys and values in whatever order its ops read fastest; MLA one latent row per token.
"""

import torch

from afserve.config import EngineConfig
from afserve.kernels.ops import Ops
from afserve.models.attention import LayerCache
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec


def allocate(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, ops: Ops) -> list[LayerCache]:
    """Zeroed, so that reading past a context gives finite numbers."""
    blocks, size = config.kv_blocks, config.block_size

    def cache(a: AttentionSpec) -> LayerCache:
        if a.kind == "mla":
            return (ops.empty_cache((blocks, size, a.kv_width), dtype),)
        return ops.empty_kv(blocks, a.kv_heads, size, (a.head_dim, a.value_dim), dtype)

    return [cache(spec.layer(layer).attention) for layer in range(spec.layers)]
