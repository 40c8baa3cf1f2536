"""What the door refuses: tensors whose shape or dtype is not what an op's docstring says, named with what was expected.

Each raises ValueError, unless it says otherwise. It knows no backend and no op. Shapes as in `ops.py`.
"""

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.formats.eight_bits import key_numbers, key_width
from afserve.kernels.formats.scaled import FP8, BlockScaled, blocks_of
from afserve.kernels.grouped import STEP, Grouped, Groups, groups_of
from afserve.kernels.indexer import Indexer
from afserve.kernels.latent import MlaLayer
from afserve.kernels.layer import GqaLayer
from afserve.kernels.packed import Biases, PackedExperts, PackedLinear
from afserve.kernels.paged import PagedBatch
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
    """Both shapes as rows of numbers have them, (N, G, B, D)."""
    if (k_NGBD.dim(), v_NGBD.dim()) not in ((ROWS, ROWS), (KEYS, VALUES)):
        raise ValueError(
            f"k_NGBD, v_NGBD: {k_NGBD.dim()} and {v_NGBD.dim()} dimensions, "
            f"a cache has {ROWS} and {ROWS}, or {KEYS} and {VALUES} in tiles"
        )
    *outer, width = shape_of(k_NGBD)
    return (outer[0], outer[1], outer[2], key_numbers(width, k_NGBD.dtype)), shape_of(v_NGBD)


def expect_blocks(name: str, weight: BlockScaled, shape: tuple[int, int]) -> None:
    expect_shape(f"{name}.q_OI", weight.q_OI, shape)
    expect_shape(f"{name}.scale", weight.scale, blocks_of(*shape))
    if weight.q_OI.dtype is not FP8 or weight.scale.dtype is not torch.float32:
        raise ValueError(
            f"{name}: {weight.q_OI.dtype} with {weight.scale.dtype} scales, expected {FP8} with float32"
        )


def expect_bits(int8: bool, int4: Groups | None, fp8: bool = False) -> None:
    if int8 + fp8 + (int4 is not None) > 1:
        raise ValueError("int8, fp8, int4: weights are kept as one of them")
    if int4 is not None and (int4.size < STEP or int4.size % STEP):
        raise ValueError(f"int4: groups of {int4.size} inputs, expected a multiple of {STEP}")


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
    if len(given) != 2 * experts.bias:
        raise ValueError("gate_up_bias_J, down_bias_H: slots have both biases or none")
    if gate_up_bias_J is None or down_bias_H is None:
        return None
    expect_shape("gate_up_bias_J", gate_up_bias_J, (experts.joined,))
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


def expect_router(layer: GqaLayer | MlaLayer, hidden: int) -> None:
    if (layer.rule is None) != (layer.gate_EH is None):
        raise ValueError("gate_EH: a router needs both its gate and its rule")
    if layer.gate_EH is not None:
        expect_last("gate_EH", layer.gate_EH, hidden)
        for name, bias in (("bias_E", layer.bias_E), ("gate_bias_E", layer.gate_bias_E)):
            if bias is not None:
                expect_shape(name, bias, (layer.gate_EH.shape[0],))


def expect_gqa(layer: GqaLayer) -> None:
    hidden, size = layer.input_norm_H.shape[0], layer.head_dim
    expect_shape("post_norm_H", layer.post_norm_H, (hidden,))
    expect_sizes("qkv", layer.qkv, (layer.heads + 2 * layer.groups) * size, hidden)
    expect_sizes("out", layer.out, hidden, layer.heads * size)
    for name, norm, count in (
        ("q_norm_D", layer.q_norm_D, layer.heads),
        ("k_norm_D", layer.k_norm_D, layer.groups),
    ):
        if norm is not None:
            expect_shape(name, norm, (size * (count if layer.wide_norms else 1),))
    if layer.sink_A is not None:
        expect_shape("sink_A", layer.sink_A, (layer.heads,))
    expect_shape("cos_PD", layer.cos_PD, (layer.sin_PD.shape[0], size // 2))
    expect_shape("sin_PD", layer.sin_PD, (layer.cos_PD.shape[0], size // 2))
    expect_router(layer, hidden)


def expect_cache(layer: GqaLayer, k_NGBD: Tensor, v_NGBD: Tensor) -> None:
    """The keys and values of a layer; ConfigError where its chunks are no whole blocks."""
    keys, values = cache_shapes(k_NGBD, v_NGBD)
    wanted = (keys[0], layer.groups, keys[2], layer.head_dim)
    if keys != wanted:
        raise ValueError(f"k_NGBD: shape {keys}, expected {wanted}")
    if values != wanted:
        raise ValueError(f"v_NGBD: shape {values}, expected {wanted}")
    chunk = layer.steps.chunk
    if chunk is not None and chunk % keys[2]:
        raise ConfigError(
            f"block_size: {keys[2]} tokens do not divide the {chunk} of the model's attention_chunk_size; "
            "use a block size that does",
            param="block_size",
        )


def expect_delta(rows: DeltaRows, layer: DeltaLayer, batch: PagedBatch) -> None:
    shape = layer.shape
    expect_shape("mixed_TC", rows.mixed_TC, (batch.tokens, shape.channels))
    expect_shape("decay_TE", rows.decay_TE, (batch.tokens, shape.decays))
    expect_shape("beta_TV", rows.beta_TV, (batch.tokens, shape.value_heads))
    expect_shape("conv_WC", layer.conv_WC, (shape.taps, shape.channels))
    for name, x, size in (
        ("bias_C", layer.bias_C, shape.channels),
        ("skip_V", layer.skip_V, shape.value_heads),
    ):
        if x is not None:
            expect_shape(name, x, (size,))


def expect_mla(layer: MlaLayer) -> None:
    hidden, rank, head = layer.input_norm_H.shape[0], layer.rank, layer.nope + layer.rope
    expect_shape("post_norm_H", layer.post_norm_H, (hidden,))
    if (layer.q_up is None) != (layer.q_norm_R is None):
        raise ValueError("q_up: a query with a rank of its own needs both its norm and its second projection")
    query = layer.heads * head
    if layer.q_up is not None and layer.q_norm_R is not None:
        query = layer.q_norm_R.shape[0]
        expect_sizes("q_up", layer.q_up, layer.heads * head, query)
    expect_sizes("down", layer.down, query + (0 if layer.borrows else rank + layer.rope), hidden)
    expect_sizes("out", layer.out, hidden, layer.heads * layer.value_size)
    for name, packed, sizes in (
        ("up_k", layer.up_k, (layer.heads, rank, layer.nope)),
        ("up_v", layer.up_v, (layer.heads, layer.value_size, rank)),
    ):
        found = packed.heads, packed.outputs, packed.inputs
        if found != sizes:
            raise ValueError(f"{name}: {found}, expected {sizes}")
    expect_shape("cos_PD", layer.cos_PD, (layer.sin_PD.shape[0], layer.rope // 2))
    expect_shape("sin_PD", layer.sin_PD, (layer.cos_PD.shape[0], layer.rope // 2))
    if layer.indexer is not None:
        expect_indexer(layer.indexer, layer)
    expect_router(layer, hidden)


def expect_indexer(indexer: Indexer, layer: MlaLayer) -> None:
    read, hidden = layer.q_norm_R, layer.input_norm_H.shape[0]
    if indexer.own is not None:
        read = indexer.own.norm_H
        expect_shape("indexer.own.norm_H", read, (hidden,))
        expect_shape("indexer.own.scale", indexer.own.scale.scale_A, (indexer.heads,))
    if read is None:
        raise ValueError("indexer: its queries need those of attention to have a rank of their own")
    heads, dim = indexer.heads, indexer.dim
    expect_sizes("indexer.queries", indexer.queries, heads * dim, read.shape[0])
    expect_sizes("indexer.keys", indexer.keys, dim, hidden)
    expect_sizes("indexer.weights", indexer.weights, heads, hidden)
    expect_shape("indexer.norm_I", indexer.norm_I, (dim,))
    expect_shape("indexer.bias_I", indexer.bias_I, (dim,))
    if dim < layer.rope or indexer.top < 1:
        raise ValueError(
            f"indexer: keys of {dim} numbers, {layer.rope} of them turned, for the {indexer.top} best rows; expected "
            "no more turned than there are, and 1 row or more"
        )


def expect_latent_cache(layer: MlaLayer, cache_NBC: Tensor, index_NBI: Tensor | None) -> None:
    """The latents of a layer, and the keys of its indexer if it has one."""
    expect_rank("cache_NBC", cache_NBC, 3)
    expect_last("cache_NBC", cache_NBC, key_width(layer.rank + layer.rope, cache_NBC.dtype))
    if (layer.indexer is None) != (index_NBI is None):
        raise ValueError("index_NBI: a layer with an indexer needs a cache of its keys, any other has none")
    if layer.indexer is not None and index_NBI is not None:
        width = key_width(layer.indexer.dim, index_NBI.dtype)
        expect_shape("index_NBI", index_NBI, (*cache_NBC.shape[:2], width))


def expect_latents(name: str, x: Tensor, cache_NBC: Tensor, tokens: int) -> None:
    """A row for each token, or one for each of its heads, as a cache of latents has them."""
    expect_rank("cache_NBC", cache_NBC, 3)
    expect_last(name, x, key_numbers(cache_NBC.shape[2], cache_NBC.dtype))
    if x.shape[0] != tokens:
        raise ValueError(f"{name}: {x.shape[0]} tokens, expected {tokens}")


def expect_marks(bad_T: Tensor | None, rows: int) -> None:
    """One int32 per row, or none at all."""
    if bad_T is not None and (
        bad_T.dtype is not torch.int32 or bad_T.shape != (rows,) or not bad_T.is_contiguous()
    ):
        raise ValueError(
            f"bad_T: shape {tuple(bad_T.shape)} of {bad_T.dtype}, expected ({rows},) of {torch.int32}, contiguous"
        )
