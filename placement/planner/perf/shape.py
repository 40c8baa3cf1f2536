"""A model as the planner sees it: per kind of layer the bytes it reads, the FLOPs it does and the cache it keeps.

Elements, not bytes: precision is the caller's. `shape_attention.py` and `shape_reader.py` build these values from the
layers of a `config.json`; this file only holds them and adds them up. It knows no hardware and no batch.
"""

from dataclasses import dataclass, replace

from afserve.tiles import EncoderSpec


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """`layers` layers that share one attention kind (mla, gqa, mfa, window, sparse, linear).

    weight_elems: projection weights of one layer. kv_elems: cached elements per token and layer.
    pair_flops: FLOPs for one query token and one attended token in decode (both matrix products, absorbed for MLA);
    prefill_pair_flops: the same in prefill. reach: tokens attended at most (0 = all); holds: tokens cached at most
    (0 = all), which are a window's, or a chunk's (`chunked`). scan_elems and scan_flops: read and done per cached token
    before attending (a sparse indexer), within kv_elems. state_elems: cache per request whatever its length. kv_heads:
    how many ways the cache divides over tensor-parallel devices. row_elems: activations one token writes and reads back
    between the products.
    """

    kind: str
    layers: int
    weight_elems: int
    kv_elems: int
    pair_flops: float
    prefill_pair_flops: float
    heads: int
    kv_heads: int
    reach: int = 0
    holds: int = 0
    chunked: bool = False
    scan_elems: int = 0
    scan_flops: float = 0.0
    state_elems: int = 0
    row_elems: int = 0

    def cached_bytes(self, element: int) -> int:
        """Per token and layer in a cache of this project, of numbers of so many bytes: `AttentionSpec.kv_bytes`."""
        scales = 8 * (self.kv_heads + (self.scan_elems > 0)) if element == 1 and self.kv_elems else 0
        return element * self.kv_elems + scales


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The MoE layers. `elems`: one routed expert's weights; `shared_elems`: the shared expert's, 0 without one. `row`:
    numbers of a row on its way to an expert and back, where that is a latent and not the hidden size; `latent_elems`:
    the weights that lead there and back, on attention devices. `top_k`: to how many experts a row is sent, on the mean;
    `zero_experts` are further ones that a router scores, which compute nothing and are sent nothing."""

    layers: int
    experts: int
    top_k: float
    elems: int
    shared_elems: int = 0
    row: int = 0
    latent_elems: int = 0
    zero_experts: int = 0

    @property
    def local_elems(self) -> int:
        """What of a layer's experts is on attention devices, but for the router."""
        return self.shared_elems + self.latent_elems


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`table_elems`: of a look-up table, which lies in no device's memory. An `encoder` of pictures lies in that of
    each attention node. stored: `fp8` or `mxfp4` where the published checkpoint is; "" for 16 bits, or nobody said."""

    name: str
    hidden: int
    vocab: int
    attention: tuple[AttentionLayers, ...]
    experts: ExpertLayers
    dense_layers: int
    dense_elems: int
    mtp_layers: int = 0
    source: str = ""
    rows_of: str = ""
    table_elems: int = 0
    encoder: EncoderSpec | None = None
    stored: str = ""

    @property
    def rows_name(self) -> str:
        """The model whose measured rows are this one's: the same layers under another name are no other model."""
        return self.rows_of or self.name

    def same_layers(self, other: "ModelShape") -> bool:
        """Whether both are the same shape, whatever their names."""
        own = replace(self, name=other.name, source=other.source, rows_of=other.rows_of)
        return replace(own, stored=other.stored) == other

    @property
    def expert_row(self) -> int:
        """Numbers of a row that is dispatched or combined."""
        return self.experts.row or self.hidden

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.attention)

    @property
    def attention_elems(self) -> int:
        """Everything an attention node holds: projections, routers, shared and dense FFN, embedding and head."""
        projections = sum(group.layers * group.weight_elems for group in self.attention)
        router = self.experts.layers * self.hidden * (self.experts.experts + self.experts.zero_experts)
        ffn = self.experts.layers * self.experts.local_elems + self.dense_layers * self.dense_elems
        return projections + router + ffn + 2 * self.vocab * self.hidden

    @property
    def expert_elems(self) -> int:
        """All routed experts of all layers."""
        return self.experts.layers * self.experts.experts * self.experts.elems

    @property
    def total_elems(self) -> int:
        return self.attention_elems + self.expert_elems + self.table_elems

    @property
    def active_elems(self) -> int:
        """Weights one token passes through (the embedding row not counted)."""
        routed = round(self.experts.layers * self.experts.top_k * self.experts.elems)
        return self.attention_elems - self.vocab * self.hidden + routed

    def kv_elems(self, context: float) -> float:
        """Cached elements of one request of `context` tokens, all layers."""
        total = 0.0
        for group in self.attention:
            held = min(context, group.holds) if group.holds else context
            total += group.layers * (group.kv_elems * held + group.state_elems)
        return total
