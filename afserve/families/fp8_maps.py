"""How many numbers of an attention node's linear maps stay in the blocks of 128 x 128 that an FP8 checkpoint has, where
kernels multiply those. It counts by shapes and names as `models/dense.py` finds it tensor by tensor: maps of some
families, of indexers and of states are counted as de-quantised, whichever they are. It knows no kernel.
"""

from afserve.families.pattern.naming import Naming
from afserve.families.table import naming_of
from afserve.spec import FP8_BLOCK, ModelSpec
from afserve.spec_parts import AttentionSpec, DenseSpec, projections_of


def parameters_in_blocks(spec: ModelSpec) -> int:
    """0 where the checkpoint has other blocks, or none. The embedding, the LM head, routers and what MLA multiplies
    head by head are in none."""
    if not spec.in_fp8_blocks:
        return 0
    said, naming = spec.coverage, naming_of(spec)
    found = 0
    for layer in range(len(spec.pattern)):
        attention, ffn = spec.layer(layer).attention, spec.layer(layer).ffn
        if said is None or said.covers(naming.layer(layer, f"{naming.attention}.{naming.out}")):
            found += _of_attention(attention, spec.hidden, naming)
        dense = isinstance(ffn, DenseSpec)
        names = naming.dense(layer) if dense else naming.shared_expert(layer)
        if said is None or said.covers(names[-1].removesuffix(".weight")):
            inner = ffn.inner if isinstance(ffn, DenseSpec) else ffn.shared_inner
            found += _whole(inner) * projections_of(ffn.activation) * spec.hidden
    return found


def _of_attention(a: AttentionSpec, h: int, naming: Naming) -> int:
    if a.kind == "mla":
        rank = a.q_lora_rank
        query = h * rank + rank * a.heads * a.head_dim if rank else h * a.heads * a.head_dim
        latent = h * (a.kv_lora_rank + a.rope_dim) * (a.source is None)
        joined = _whole(rank or a.heads * a.head_dim) > 0  # the latent's map follows the query's
        return joined * (query + latent) + h * (_whole(a.heads * a.value_dim) + a.gate_width)
    if a.kind != "gqa" or a.value_dim != a.head_dim:
        return 0
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    turned = (
        FP8_BLOCK % a.head_dim == 0 or a.head_dim % FP8_BLOCK == 0
    )  # rows of a head change places within blocks
    joined = turned and not naming.qkv and _whole(queries) > 0 and _whole(keys) > 0
    gate = a.gate_width if joined else 0
    return h * (joined * (queries + 2 * keys) + gate + _whole(queries) * (a.out_scale == 1.0))


def _whole(numbers: int) -> int:
    """As many, where they are whole blocks."""
    return 0 if numbers % FP8_BLOCK else numbers
