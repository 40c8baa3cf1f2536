"""One decoder layer's attention half with a latent (MLA) as values: its weights, what a backend made of them, and the
two tied to a cache. The up-projections are absorbed: W_UK moves to the query's side, W_UV behind the softmax.

Source: DeepSeek-V2 (arXiv 2405.04434, 2.1.2). Shapes: H hidden, A query heads, C latent rank, R the query's own rank,
E experts, P positions, D half the rotary size; N blocks of B tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from afserve.kernels.indexer import Indexer, NearRows
from afserve.kernels.layer import NO_STEPS, Steps
from afserve.kernels.packed import PackedHeads, PackedLinear
from afserve.kernels.routing import RouterRule


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """`down` stacks the query's first projection over the latent and its rotary key. With a rank of its own the query
    is normalised (`q_norm_R`) and goes through `q_up`; without one both are None. A head of it is `nope` elements that
    meet the latent by `up_k`, A x (C, nope), and `rope` that are turned; `up_v` is A x (value, C).

    With an `indexer` a token attends the rows that it chooses; with `reuses` those that the last layer with one chose.
    A layer that `borrows` is bound to the latents of another one: it writes none, and `down` makes its query alone.

    Norms have the rows' dtype. Without a router `gate_EH` and `rule` are None; `gate_bias_E` is added to the router's
    logits, `bias_E` only to what experts are chosen by.
    """

    input_norm_H: Tensor
    down: PackedLinear
    q_norm_R: Tensor | None
    q_up: PackedLinear | None
    latent_norm_C: Tensor
    up_k: PackedHeads
    up_v: PackedHeads
    cos_PD: Tensor
    sin_PD: Tensor
    interleaved: bool
    out: PackedLinear
    post_norm_H: Tensor
    gate_EH: Tensor | None
    bias_E: Tensor | None
    gate_bias_E: Tensor | None
    rule: RouterRule | None
    heads: int
    nope: int
    rope: int
    eps: float
    latent_eps: float
    scale: float
    steps: Steps = NO_STEPS
    indexer: Indexer | None = None
    reuses: bool = False
    borrows: bool = False

    @property
    def rank(self) -> int:
        return self.latent_norm_C.shape[0]

    @property
    def value_size(self) -> int:
        """Elements of a head's output."""
        return self.up_v.outputs

    @property
    def query(self) -> int:
        """Outputs of `down` that are the query's."""
        return self.down.outputs - (0 if self.borrows else self.rank + self.rope)


@dataclass(frozen=True, slots=True)
class PreparedMla:
    """What `Ops.prepare_mla` made of a layer, once at load. Only the backend reads `handle`; None: single ops run."""

    layer: MlaLayer
    handle: object | None = None


@dataclass(frozen=True, slots=True)
class BoundMla:
    """A layer and its part of a cache, that of its indexer's keys among it. With `near` chosen rows are attended there.
    Only the backend reads `handle`, which may hold addresses: what they point at is held by this value too."""

    layer: MlaLayer
    cache_NBC: Tensor
    handle: object | None = None
    index_NBI: Tensor | None = None
    near: NearRows | None = None
