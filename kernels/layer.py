"""One decoder layer's attention half as values: its weights, what a backend made of them, and the two tied to a cache.

Shapes: T tokens, H hidden, A query heads, D head size or values, E experts or decays, P positions,
C channels of a convolution, W its taps.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.indexer import BlockIndexer
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.pointwise import LogScale
from afserve.kernels.routing import RouterRule


@dataclass(frozen=True, slots=True)
class Steps:
    """What few families do in an attention half. A backend's fused half may lack some of it; single ops do all of it.

    `centred`: both norms subtract the mean (LayerNorm) and add their biases, if they have any. `clip` bounds q, k and v
    on both sides. `late`: the norms of q and k follow the rotary embedding. `chunk`: attention ends at the beginning of
    an aligned chunk of so many positions; a multiple of the block size. `q_scale_P` multiplies queries by position.
    The sigmoid of what `gate` makes of the normalised row, a number for each head or each of its numbers, multiplies
    what heads saw; or the `softplus` of it. `after_norm_H` is an RMS norm of what attention adds.
    `parallel`: the FFN's norm is of the row before attention adds to it. Values of each head are normalised where there
    is a `v_norm_D`. The router reads the row by a `router_norm_H` of its own, and `expert_scale_E` multiplies weights.
    `blocks` chooses the blocks of keys that are attended. `log_scale` multiplies queries by position, head by head.
    """

    centred: bool = False
    input_bias_H: Tensor | None = None
    post_bias_H: Tensor | None = None
    clip: float | None = None
    late: bool = False
    chunk: int | None = None
    q_scale_P: Tensor | None = None
    gate: PackedLinear | None = None
    softplus: bool = False
    after_norm_H: Tensor | None = None
    parallel: bool = False
    v_norm_D: Tensor | None = None
    router_norm_H: Tensor | None = None
    expert_scale_E: Tensor | None = None
    blocks: BlockIndexer | None = None
    log_scale: LogScale | None = None

    def names(self, *, gated: bool = False) -> str:
        """For the log; empty where there is none. `gated`: a gate is none of them."""
        told = (
            (self.centred, "LayerNorm"),
            (self.clip is not None, "clipped projections"),
            (self.late, "norms after the rotary embedding"),
            (self.chunk is not None, "attention in chunks"),
            (self.q_scale_P is not None, "queries scaled by position"),
            (self.gate is not None and not gated, "a gate for the output"),
            (self.after_norm_H is not None, "a norm of what attention adds"),
            (self.parallel, "an FFN beside attention"),
            (self.v_norm_D is not None, "norms of values"),
            (self.router_norm_H is not None, "a norm for the router"),
            (self.expert_scale_E is not None, "a scale for each expert"),
            (self.blocks is not None, "attention to chosen blocks"),
            (self.log_scale is not None, "queries scaled by the logarithm of their position"),
        )
        return ", ".join(name for there, name in told if there)


NO_STEPS = Steps()


@dataclass(frozen=True, slots=True)
class GqaLayer:
    """Projections are packed: `qkv` stacks heads of q, then k, then v. Norms have the rows' dtype.

    `q_norm_D` and `k_norm_D` are norms of each head, or (A D) and (G D) of all heads together. `sink_A` is a logit per
    head that takes weight and gives no value. Without a router `gate_EH` and `rule` are None; `gate_bias_E` is added to
    the router's logits, `bias_E` only to what experts are chosen by.
    """

    input_norm_H: Tensor
    qkv: PackedLinear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    cos_PD: Tensor
    sin_PD: Tensor
    out: PackedLinear
    post_norm_H: Tensor
    gate_EH: Tensor | None
    bias_E: Tensor | None
    rule: RouterRule | None
    heads: int
    groups: int
    head_dim: int
    eps: float
    scale: float
    window: int | None = None
    sink_A: Tensor | None = None
    gate_bias_E: Tensor | None = None
    steps: Steps = NO_STEPS

    @property
    def wide_norms(self) -> bool:
        """Whether queries and keys are normalised over all heads together."""
        return self.q_norm_D is not None and self.q_norm_D.shape[0] != self.head_dim

    def unusual(self, *, gated: bool = False) -> str:
        """What a plain fused half lacks, or one with a gate, for the log; empty for a layer without."""
        wide = "norms of all heads together" if self.wide_norms else ""
        return ", ".join(filter(None, (self.steps.names(gated=gated), wide)))


@dataclass(frozen=True, slots=True)
class PreparedGqa:
    """What `Ops.prepare_gqa` made of a layer, once at load. Only the backend reads `handle`; None: single ops run."""

    layer: GqaLayer
    handle: object | None = None


@dataclass(frozen=True, slots=True)
class BoundGqa:
    """What `Ops.bind_gqa` made of a layer and its part of a cache: all that a step does not change.

    Only the backend reads `handle`, which may hold addresses: what they point at is held by this value too.
    """

    layer: GqaLayer
    k_NGBD: Tensor
    v_NGBD: Tensor
    handle: object | None = None
    index_NBI: Tensor | None = None


class Half(NamedTuple):
    """What an attention half hands to the FFN half; the last two are None without a router."""

    normed_TH: Tensor
    expert_TK: Tensor | None
    weight_TK: Tensor | None


@dataclass(frozen=True, slots=True)
class MixerParts:
    """`down` makes all that a mixer reads of a row: of a rule, with its `delta`, queries, keys and values, and then by
    `head` the gate, shares and decays; by `channel` shares, decays and the gate, or what `second` makes these two of;
    by `sum` the gate and steps; of a convolution with its taps `conv_WC` the gate in front of it, the one behind it,
    and values, and `bias_C` is added behind the taps. `rate_E` and `step_E` are float32, by decay; `floor` multiplies
    sigmoids where there is one. `norm_D` is of each value, or by `sum` of all, in `norm_groups`."""

    kind: Literal["head", "channel", "sum", "convolution"]
    down: PackedLinear
    out: PackedLinear
    second: tuple[PackedLinear, ...] = ()
    delta: DeltaLayer | None = None
    rate_E: Tensor | None = None
    step_E: Tensor | None = None
    floor: float | None = None
    norm_D: Tensor | None = None
    norm_groups: int = 1
    conv_WC: Tensor | None = None
    bias_C: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Without a `mixer` it is the norm before an FFN, which is `post_norm_H`, and the router. Without a router
    `gate_EH` and `rule` are None."""

    mixer: MixerParts | None
    input_norm_H: Tensor
    post_norm_H: Tensor
    gate_EH: Tensor | None
    bias_E: Tensor | None
    gate_bias_E: Tensor | None
    rule: RouterRule | None
    eps: float


@dataclass(frozen=True, slots=True)
class BoundStates:
    """A layer over the states of one cache. Only the backend reads `handle`, and holds what it points at."""

    layer: StateLayer
    cache_NBE: Tensor
    handle: object


class StateRows(NamedTuple):
    """What stands before the states: rows of a rule, or (T, C) float32 of a convolution, and the gate behind it."""

    rows: DeltaRows | Tensor
    gate_TD: Tensor


class FusedStates(ABC):
    """What a backend made of a layer, once at load."""

    @abstractmethod
    def bind(self, cache_NBE: Tensor) -> BoundStates:
        """The same weights may be bound to several caches."""

    @abstractmethod
    def run_half(self, x_TH: Tensor, bound: BoundStates, batch: PagedBatch) -> Half:
        """x_TH becomes, in place, the residual stream behind the mixer; states are read and written."""

    @abstractmethod
    def begin_half(self, x_TH: Tensor) -> StateRows:
        """Its first part, with the same bits, where somebody else moves the states."""

    @abstractmethod
    def end_half(self, x_TH: Tensor, read_TD: Tensor, gate_TD: Tensor) -> Half:
        """Its last part: `read_TD` is float32, what was read of the states, and may be changed."""

    @abstractmethod
    def convolve(self, x_TC: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """A convolution alone, (T, C) float32, with the bits of `run_half`."""
