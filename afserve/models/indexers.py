"""The indexers of sparse attention, of a layer's tensors: DeepSeek's, that chooses rows, and MiniMax M3's of blocks."""

from afserve.kernels.indexer import BlockIndexer, Indexer, NormalisedQueries
from afserve.kernels.pointwise import LogScale
from afserve.models.halves import LayerTensors
from afserve.spec_parts import AttentionSpec


def latent_indexer(a: AttentionSpec, h: int, tensors: LayerTensors) -> Indexer:
    """Whole on each of several devices: all of them have to choose the same rows."""
    of, linear, read = a.indexer, tensors.dense.linear, tensors.attention
    assert of is not None, "asked by who has one"
    own = None
    if of.own:
        norm_H, bias_H = (read(f"indexer.q_input_norm.{one}", h) for one in ("weight", "bias"))
        own = NormalisedQueries(norm_H, bias_H, _log_scale("indexer.", of.heads, tensors))
    inputs = h if own or a.q_lora_rank is None else a.q_lora_rank
    return Indexer(
        queries=linear(read("indexer.wq_b.weight", of.heads * of.dim, inputs)),
        keys=linear(read("indexer.wk.weight", of.dim, h)),
        weights=linear(read("indexer.weights_proj.weight", of.heads, h)),
        norm_I=read("indexer.k_norm.weight", of.dim),
        bias_I=read("indexer.k_norm.bias", of.dim),
        top=of.top,
        interleaved=of.interleaved,
        own=own,
    )


def share_scale(a: AttentionSpec, tensors: LayerTensors) -> LogScale | None:
    """What queries of the share's heads are multiplied by."""
    if not a.log_scaled:
        return None
    whole, share = _log_scale("", a.heads, tensors), tensors.share
    return LogScale(share.cut_rows(whole.scale_A, a.heads), share.cut_rows(whole.bias_A, a.heads))


def _log_scale(stem: str, heads: int, tensors: LayerTensors) -> LogScale:
    names = tensors.naming.latent
    scale_A, bias_A = (tensors.attention(stem + one, heads) for one in (names.log_scale, names.log_bias))
    return LogScale(scale_A, bias_A)


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
