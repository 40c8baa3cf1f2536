"""The KV cache's memory: one set of paged tensors per layer, allocated once.

GQA keeps keys and values as (blocks, heads, block size, head size); MLA one latent row per token.
"""

import math

import numpy as np
import torch
from torch import Tensor

from afserve.config import EngineConfig
from afserve.models.attention import LayerCache
from afserve.spec import ModelSpec


def allocate(
    spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Zeroed, so that reading past a context gives finite numbers."""
    a, blocks, size = spec.attention, config.kv_blocks, config.block_size

    def layer() -> LayerCache:
        if a.kind == "mla":
            return (_zeros((blocks, size, a.kv_width), dtype, device),)
        return (
            _zeros((blocks, a.kv_heads, size, a.head_dim), dtype, device),
            _zeros((blocks, a.kv_heads, size, a.value_dim), dtype, device),
        )

    return [layer() for _ in range(spec.layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU pages that are zero until touched: torch.zeros would write, and so occupy, the whole cache at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
