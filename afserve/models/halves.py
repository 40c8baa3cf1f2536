"""What an attention half is, whatever its layer computes, and how one reads its layer's tensors.

Shapes: T tokens, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afserve.families.pattern.naming import Naming, bias_of
from afserve.kernels.cache import KeptShape, LayerCache, StateShape
from afserve.kernels.formats.scaled import GROUP, ScaledRows
from afserve.kernels.layer import BoundStates, Half, MixerParts, StateLayer
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import BoundLayer
from afserve.models.dense import Dense, Rows, Weight
from afserve.models.rope import Rotary
from afserve.models.router import Router
from afserve.models.weights import WholeTensors
from afserve.spec import ModelSpec
from afserve.spec_parts import NO_FFN, AttentionSpec


class BoundHalf(Protocol):
    """An attention half with the layer's part of one cache."""

    @property
    def bound(self) -> BoundLayer | None:
        """What the kernels made of both; None for a half that is made of several ops."""

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        """x_TH becomes, in place, the residual stream after attention; keys and values are written."""


class AttentionHalf(Protocol):
    @property
    def keeps(self) -> KeptShape:
        """What it writes to a cache."""

    def bind(self, cache: LayerCache) -> BoundHalf:
        """The same weights may be bound to several caches."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Part `index` of `count` equal ones of a layer's query heads, and the key/value heads that these read: several
    devices keep the same one where there are fewer than devices. Each computes what its heads add to the residual
    stream (`add_heads` of models/attention.py); the sum goes into `Ops.join_half` on the first one, which adds the
    output's bias and has the residual stream, routers and both ends. An FFN's inner numbers are cut as so many heads.
    Shapes: R rows, H hidden."""

    index: int = 0
    count: int = 1

    def heads_of(self, heads: int) -> int:
        return max(heads // self.count, 1)

    def cut_rows(self, x_R: Rows, heads: int) -> Rows:
        """The share's own, rows or numbers, out of those of `heads` one after the other. Of several shares one does not
        keep the others' memory."""
        size, first = len(x_R) // heads, self.index * heads // self.count
        own = x_R[first * size : (first + self.heads_of(heads)) * size]
        return own.clone() if self.count > 1 and isinstance(own, Tensor) else own

    def cut_columns(self, x_HR: Tensor, heads: int) -> Tensor:
        return self.cut_rows(x_HR.T, heads).T.contiguous()

    def cut_groups(self, x_HR: ScaledRows, heads: int) -> ScaledRows | None:
        """The same of FP8 blocks; None where the share's own columns begin or end within one."""
        columns = x_HR.q_OI.shape[1]
        size, first = columns // heads, self.index * heads // self.count
        begin, end = first * size, (first + self.heads_of(heads)) * size
        whole = not begin % GROUP and (end == columns or not end % GROUP)
        return x_HR.columns(begin, end) if whole else None


ALL_HEADS = HeadShare()


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's tensors by their short names, how its linear maps are kept, and which of its heads are wanted."""

    source: WholeTensors
    naming: Naming
    layer: int
    dtype: torch.dtype
    dense: Dense
    norm_less_one: bool = False
    share: HeadShare = ALL_HEADS

    def __call__(self, part: str, *shape: int) -> Tensor:
        return self.source.tensor(self.naming.layer(self.layer, part), shape, self.dtype)

    def attention(self, part: str, *shape: int) -> Tensor:
        return self(f"{self.naming.attention}.{part}", *shape)

    def weight(self, part: str, outputs: int, inputs: int) -> Weight:
        """Of a linear map, for `dense`."""
        return self.dense.read(self.source, self.naming.layer(self.layer, part), (outputs, inputs))

    def attention_weight(self, part: str, outputs: int, inputs: int) -> Weight:
        return self.weight(f"{self.naming.attention}.{part}", outputs, inputs)

    def attention_columns(self, part: str, outputs: int, inputs: int, heads: int) -> Weight:
        name = self.naming.layer(self.layer, f"{self.naming.attention}.{part}")
        return self.columns(name, (outputs, inputs), heads)

    def columns(self, name: str, shape: tuple[int, int], heads: int) -> Weight:
        """The share's own inputs of a linear map, those of `heads` one after the other."""
        weight = self.dense.read(self.source, name, shape)
        if isinstance(weight, ScaledRows):
            own = self.share.cut_groups(weight, heads)
            if own is not None:
                return own
            weight = weight.dequantised().to(self.dtype)
        return self.share.cut_columns(weight, heads) if isinstance(weight, Tensor) else weight

    def linear(self, part: str, *shape: int) -> Tensor:
        """Of a gated delta net."""
        return self(f"{self.naming.linear}.{part}", *shape)

    def norm(self, part: str, size: int) -> Tensor:
        """A norm's weights, what is added to one included. Added in float32: they are rounded once."""
        name = self.naming.layer(self.layer, part)
        return norm_weights(self.source, name, size, self.dtype, self.norm_less_one)

    def after_attention(self, a: AttentionSpec, hidden: int) -> Tensor | None:
        """The norm of what attention adds, where it has one."""
        return self.norm(self.naming.after_attention, hidden) if a.normed else None

    def norm_biases(self, hidden: int) -> tuple[Tensor, Tensor]:
        names = bias_of(self.naming.input_norm), bias_of(self.naming.post_norm)
        return self(names[0], hidden), self(names[1], hidden)

    def norms(self, spec: ModelSpec) -> tuple[Tensor, Tensor]:
        """The one before attention and the one before the FFN; ones where there is no FFN to read it."""
        before = self.norm(self.naming.input_norm, spec.hidden)
        if spec.layer(self.layer).ffn == NO_FFN:
            return before, torch.ones_like(before)
        return before, self.norm(self.naming.post_norm, spec.hidden)


LoadHalf = Callable[[ModelSpec, LayerTensors, Ops, Rotary, Router | None], AttentionHalf]
Part = Callable[[Tensor], Tensor]
"""What one of several devices adds to rows (T, H) that it is given, in float32."""
SplitFfn = Callable[[Callable[[LayerTensors, Ops], Part], LayerTensors, int], Part | None]


@dataclass(frozen=True, slots=True)
class SplitLoading:
    """How the layers of a node on several devices are loaded. `ffn` is told how one share of an FFN is and its inner
    size, and gives what all add together, or None where it is not split. `head` is told the LM head and its bias, and
    gives what makes logits of rows; None: it is whole on the first device. `further` are the devices behind it."""

    half: LoadHalf
    ffn: SplitFfn
    head: Callable[[Tensor, Tensor | None], Part] | None
    further: tuple[torch.device, ...]


def norm_weights(source: WholeTensors, name: str, size: int, dtype: torch.dtype, less_one: bool) -> Tensor:
    """Weights of an RMS norm; checkpoints of some families hold them `less_one`."""
    if not less_one:
        return source.tensor(name, (size,), dtype)
    return (source.tensor(name, (size,), torch.float32) + 1.0).to(dtype)


def state_layer(
    parts: MixerParts | None, norms: tuple[Tensor, Tensor], router: Router | None, eps: float
) -> StateLayer:
    """As kernels are told of it."""
    if router is None:
        return StateLayer(parts, *norms, None, None, None, None, eps)
    return StateLayer(parts, *norms, router.gate_EH, router.bias_E, router.gate_bias_E, router.rule, eps)


class FfnAlone:
    """The half of a layer that has no attention: the norm before its FFN, and the router. It keeps nothing."""

    keeps = StateShape(0)

    def __init__(self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, router: Router | None) -> None:
        self._ops, self._router, self._eps = ops, router, spec.eps
        self._norm = norm_H = tensors.norm(tensors.naming.post_norm, spec.hidden)
        self._fused = ops.prepare_states(state_layer(None, (norm_H, norm_H), router, spec.eps))

    def bind(self, cache: LayerCache) -> BoundHalf:
        (nothing,) = cache
        return BoundFfn(self, None if self._fused is None else self._fused.bind(nothing))

    def run(self, x_TH: Tensor, bound: BoundStates | None, batch: PagedBatch) -> Half:
        """The residual stream stays as it is."""
        if bound is not None and self._fused is not None:
            return self._fused.run_half(x_TH, bound, batch)
        ops, router = self._ops, self._router
        normed_TH = ops.rms_norm(x_TH, self._norm, self._eps)
        if router is None:
            return Half(normed_TH, None, None)
        routed = ops.route(normed_TH, router.gate_EH, router.bias_E, router.rule, router.gate_bias_E)
        return Half(normed_TH, *routed)


@dataclass(frozen=True, slots=True)
class BoundFfn:
    half: FfnAlone
    bound: BoundStates | None

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.half.run(x_TH, self.bound, batch)
