"""What the door refuses: tensors whose shape or dtype is not what an op's docstring says, named with what was expected.

Each raises ValueError. It knows no backend and no op. Shapes as in `ops.py`.
"""

import torch
from torch import Tensor

from afserve.kernels.grouped import Grouped, Groups, groups_of
from afserve.kernels.packed import Biases, PackedExperts, PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.scaled import FP8, BlockScaled, blocks_of
from afserve.kernels.tiled import KEYS, ROWS, VALUES, shape_of


def expect_rank(name: str, x: Tensor, rank: int) -> None:
    if x.dim() != rank:
        raise ValueError(f"{name}: {x.dim()} dimensions {tuple(x.shape)}, expected {rank}")


def expect_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:  # a torch.Size is a tuple
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {tuple(shape)}")


def cache_shapes(
    k_NGBD: Tensor, v_NGBD: Tensor
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Both shapes as rows have them, (N, G, B, D)."""
    if (k_NGBD.dim(), v_NGBD.dim()) not in ((ROWS, ROWS), (KEYS, VALUES)):
        raise ValueError(
            f"k_NGBD, v_NGBD: {k_NGBD.dim()} and {v_NGBD.dim()} dimensions, "
            f"a cache has {ROWS} and {ROWS}, or {KEYS} and {VALUES} in tiles"
        )
    return shape_of(k_NGBD), shape_of(v_NGBD)


def expect_blocks(name: str, weight: BlockScaled, shape: tuple[int, int]) -> None:
    expect_shape(f"{name}.q_OI", weight.q_OI, shape)
    expect_shape(f"{name}.scale", weight.scale, blocks_of(*shape))
    if weight.q_OI.dtype is not FP8 or weight.scale.dtype is not torch.float32:
        raise ValueError(
            f"{name}: {weight.q_OI.dtype} with {weight.scale.dtype} scales, expected {FP8} with float32"
        )


def expect_groups(name: str, weight: Grouped, shape: tuple[int, int], kept: Groups) -> None:
    expect_shape(f"{name}.code_OI", weight.code_OI, shape)
    expect_shape(f"{name}.scale_OG", weight.scale_OG, (shape[0], groups_of(shape[1], kept.size)))
    if weight.size != kept.size:
        raise ValueError(f"{name}: groups of {weight.size} inputs, these slots have {kept.size}")
    if weight.code_OI.dtype is not torch.int8 or weight.scale_OG.dtype is not torch.float32:
        raise ValueError(
            f"{name}: {weight.code_OI.dtype} with {weight.scale_OG.dtype} scales, expected torch.int8 with float32"
        )


def both_biases(
    experts: PackedExperts, gate_up_bias_J: Tensor | None, down_bias_H: Tensor | None
) -> Biases | None:
    given = [bias for bias in (gate_up_bias_J, down_bias_H) if bias is not None]
    if len(given) != (0 if experts.gate_up_bias_EJ is None else 2):
        raise ValueError("gate_up_bias_J, down_bias_H: slots have both biases or none")
    if gate_up_bias_J is None or down_bias_H is None:
        return None
    expect_shape("gate_up_bias_J", gate_up_bias_J, (2 * experts.inner,))
    expect_shape("down_bias_H", down_bias_H, (experts.hidden,))
    return gate_up_bias_J, down_bias_H


def expect_slot(slot: int, experts: PackedExperts) -> None:
    if not 0 <= slot < experts.experts:
        raise ValueError(f"slot: {slot}, there are {experts.experts} slots")


def expect_sizes(name: str, packed: PackedLinear, outputs: int, inputs: int) -> None:
    if (packed.outputs, packed.inputs) != (outputs, inputs):
        raise ValueError(f"{name}: ({packed.outputs}, {packed.inputs}), expected ({outputs}, {inputs})")


def expect_last(name: str, x: Tensor, size: int) -> None:
    if x.shape[-1] != size:
        raise ValueError(f"{name}: last dimension {x.shape[-1]}, expected {size}")


def expect_tokens(name: str, x: Tensor, batch: PagedBatch) -> None:
    if x.shape[0] != batch.tokens:
        raise ValueError(f"{name}: {x.shape[0]} tokens, the batch has {batch.tokens}")
