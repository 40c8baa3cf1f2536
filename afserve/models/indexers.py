"""The indexers of sparse attention, of a layer's tensors: DeepSeek's, that chooses rows, and MiniMax M3's of blocks."""

from afserve.kernels.indexer import BlockIndexer, Indexer
from afserve.models.halves import LayerTensors
from afserve.spec_parts import AttentionSpec


def latent_indexer(a: AttentionSpec, h: int, tensors: LayerTensors) -> Indexer:
    """Whole on each of several devices: all of them have to choose the same rows."""
    of, linear, read = a.indexer, tensors.dense.linear, tensors.attention
    assert of is not None and a.q_lora_rank is not None, "refused by families/limits.py"
    return Indexer(
        queries=linear(read("indexer.wq_b.weight", of.heads * of.dim, a.q_lora_rank)),
        keys=linear(read("indexer.wk.weight", of.dim, h)),
        weights=linear(read("indexer.weights_proj.weight", of.heads, h)),
        norm_I=read("indexer.k_norm.weight", of.dim),
        bias_I=read("indexer.k_norm.bias", of.dim),
        top=of.top,
        interleaved=of.interleaved,
    )


def block_indexer(a: AttentionSpec, h: int, tensors: LayerTensors) -> BlockIndexer:
    """Queries of the share's key heads; keys of all of them are the same."""
    of, linear, naming = a.indexer, tensors.dense.linear, tensors.naming
    assert of is not None, "asked by who has one"
    queries = tensors.attention("index_q_proj.weight", of.heads * of.dim, h)
    q_norm, k_norm = (tensors.norm(f"{naming.attention}.index_{one}_norm.weight", of.dim) for one in "qk")
    return BlockIndexer(
        linear(tensors.share.cut_rows(queries, of.heads)),
        linear(tensors.attention("index_k_proj.weight", of.dim, h)),
        q_norm,
        k_norm,
        block=of.block,
        top=of.top,
        local=of.local,
        turned=a.rope.dim if a.rope else 0,
    )
