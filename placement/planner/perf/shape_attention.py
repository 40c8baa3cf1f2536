"""Attention layers as the planner counts them: what one layer weighs, caches and multiplies.

MLA is counted absorbed in decode (every head works on the latent) and expanded in prefill, as served systems do.
Norms, biases and rotations are left out: they are below a percent. Knows no config.json, no MoE and no hardware.
"""

from collections import Counter
from collections.abc import Iterable

from afserve.placement.planner.perf.shape import AttentionLayers
from afserve.spec_parts import AttentionSpec

_ORDER = ("window", "linear")  # behind every other kind


def attention_layers(specs: Iterable[AttentionSpec], hidden: int) -> tuple[AttentionLayers, ...]:
    """All attention layers of one model, grouped by what they are; full attention first."""
    count = {"mla": _mla, "mfa": _mfa, "gqa": _gqa, "linear": _linear, "conv": _conv}
    groups = [count[spec.kind](spec, layers, hidden) for spec, layers in Counter(specs).items()]
    return tuple(
        sorted(groups, key=lambda group: _ORDER.index(group.kind) + 1 if group.kind in _ORDER else 0)
    )


def _mla(a: AttentionSpec, layers: int, hidden: int) -> AttentionLayers:
    heads, rank, rope, nope, value = a.heads, a.kv_lora_rank, a.rope_dim, a.nope_dim, a.value_dim
    q_rank = a.q_lora_rank or 0
    query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
    own = hidden * (rank + rope) if a.source is None else 0
    weights = query + own + heads * rank * (nope + value) + heads * value * hidden
    reach = a.indexer.reach if a.indexer else 0
    index_heads, index_dim = (a.indexer.heads, a.indexer.kept) if a.indexer else (0, 0)
    if index_dim:
        of_query = hidden if a.indexer and a.indexer.own else q_rank
        weights += hidden * index_dim + of_query * index_heads * index_dim + hidden * index_heads
    return AttentionLayers(
        kind="sparse" if reach else "mla",
        layers=layers,
        weight_elems=weights,
        kv_elems=a.kv_width,
        pair_flops=2.0 * heads * (2 * rank + rope),
        prefill_pair_flops=2.0 * heads * (nope + rope + value),
        heads=heads,
        kv_heads=1,
        reach=reach,
        scan_elems=index_dim,
        scan_flops=2.0 * index_heads * index_dim,
        row_elems=2 * hidden + 2 * (rank + rope) + q_rank + 2 * heads * (nope + 2 * rope + 2 * rank + value),
    )


def _mfa(a: AttentionSpec, layers: int, hidden: int) -> AttentionLayers:
    heads, dim, shared, groups = a.heads, a.head_dim, a.q_lora_rank or 0, a.kv_heads
    weights = hidden * shared + shared * heads * dim + 2 * hidden * groups * dim + heads * dim * hidden
    pair = 4.0 * heads * dim
    crossed = 2 * hidden + 2 * shared + 4 * (heads + groups) * dim
    return AttentionLayers("mfa", layers, weights, a.kv_width, pair, pair, heads, groups, row_elems=crossed)


def _gqa(a: AttentionSpec, layers: int, hidden: int) -> AttentionLayers:
    """A chunk is counted like a window of its size, an indexer's blocks as what is attended of them at most."""
    heads, kv_heads, window, both = a.heads, a.kv_heads, a.window or a.chunk or 0, a.head_dim + a.value_dim
    weights = hidden * (heads + kv_heads) * both + hidden * a.gate_width
    pair = 2.0 * heads * both
    index_heads, index_dim = (a.indexer.heads, a.indexer.kept) if a.indexer else (0, 0)
    weights += hidden * index_dim * (index_heads + 1)
    return AttentionLayers(
        kind="window" if window else "gqa",
        layers=layers,
        weight_elems=weights,
        kv_elems=a.kv_width,
        pair_flops=pair,
        prefill_pair_flops=pair,
        heads=heads,
        kv_heads=kv_heads,
        reach=a.indexer.reach if a.indexer else window,
        holds=window,
        chunked=a.window is None and a.chunk is not None,
        scan_elems=index_dim,
        scan_flops=2.0 * index_heads * index_dim,
        row_elems=2 * hidden + 2 * (heads + kv_heads) * both,
    )


def _linear(a: AttentionSpec, layers: int, hidden: int) -> AttentionLayers:
    """Lightning attention or a gated delta net: a state of key x value per head instead of a cache.

    Per token the state is decayed, corrected and read: about six FLOPs per element of its matrix. A gated delta net
    also keeps the last inputs of its convolution.
    """
    heads, key_heads, key, value = a.heads, a.kv_heads, a.head_dim, a.value_dim
    matrix = heads * key * value
    return AttentionLayers(
        kind="linear",
        layers=layers,
        weight_elems=hidden * (2 * key_heads * key + 3 * heads * value),
        kv_elems=0,
        pair_flops=0.0,
        prefill_pair_flops=0.0,
        heads=heads,
        kv_heads=heads,
        scan_flops=6.0 * matrix,
        state_elems=a.state_numbers,
        row_elems=2 * hidden + 4 * heads * value + 4 * key_heads * key,
    )


def _conv(a: AttentionSpec, layers: int, hidden: int) -> AttentionLayers:
    """A gated short convolution: its state are the last inputs."""
    return AttentionLayers(
        kind="linear",
        layers=layers,
        weight_elems=a.heads * (4 * hidden + a.taps),
        kv_elems=0,
        pair_flops=0.0,
        prefill_pair_flops=0.0,
        heads=a.heads,
        kv_heads=a.heads,
        scan_flops=2.0 * a.taps * a.heads,
        state_elems=a.state_numbers,
        row_elems=2 * hidden + 6 * a.heads,
    )
