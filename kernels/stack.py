"""The layers of a model over one cache as values, for a backend that runs a step of all of them in one call.

What such a call means is the loop of `afserve/engine/step/layer_runner.py`: the attention half, the FFN half, the
residual, layer after layer. Shapes: T tokens, K top-k, L MoE layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from torch import Tensor

from afserve.kernels.formats.ggml import GgmlRows
from afserve.kernels.latent import BoundMla
from afserve.kernels.layer import BoundGqa, BoundStates
from afserve.kernels.packed import Gating, PackedExperts, PackedLinear
from afserve.kernels.paged import PagedBatch

BoundLayer = BoundGqa | BoundMla | BoundStates
Exchange = NewType("Exchange", object)
"""The data plane's way to experts that are away, for one micro-batch. Only the native library reads it."""
LayeredExperts = NewType("LayeredExperts", object)
"""The experts of all MoE layers, for the data plane to call. Only the native library reads it."""


@dataclass(frozen=True, slots=True)
class FfnSteps:
    """What few families do behind an attention half. `gating` stands in SwiGLU's place in `ffn`; the sigmoid of a
    number that `opening` makes of a row, and `shared_scale`, multiply what the shared expert gives. Norms are of the
    row that it reads, of what it gives, of what experts give, and of all that is added, for which these are added
    together where there is one of the last two. `row_scale` multiplies the row behind the layer."""

    eps: float
    opening: PackedLinear | None = None
    gating: Gating | None = None
    shared_scale: float = 1.0
    row_scale: float = 1.0
    before_shared_H: Tensor | None = None
    after_shared_H: Tensor | None = None
    after_routed_H: Tensor | None = None
    after_H: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackLayer:
    """`ffn` is gate over up, and down: a dense layer's FFN, or the shared expert of a layer with `experts`, if it has
    one, and None too in a layer that is attention alone. Expert e is in slot e. `away`: the layer has experts, on other
    nodes. `group`: whose block table it reads."""

    half: BoundLayer
    ffn: tuple[PackedLinear, PackedLinear] | None
    experts: PackedExperts | None
    away: bool = False
    group: int = 0
    steps: FfnSteps | None = None

    @property
    def routes(self) -> bool:
        return self.away or self.experts is not None


class Stopped(NamedTuple):
    """A layer whose sums did not come as they should. Its rows were sent, and stay as they are; nothing but the sums is
    missing in x_TH, and all answers that came are still to be taken."""

    layer: int
    normed_TH: Tensor
    weight_TK: Tensor


class Stacked(NamedTuple):
    """What each MoE layer's router chose (int32), and the seconds that shared and routed experts took; where these are
    away, that rows were under way, `waited` of which nothing was computed. `stopped`: layers from there on were not
    run, and expert_LTK ends with that one."""

    expert_LTK: Tensor
    ffn_seconds: float
    waited: float = 0.0
    stopped: Stopped | None = None


@dataclass(frozen=True, slots=True)
class PredictorParts:
    """A layer of multi-token prediction but for its decoder layer: what its rows are made of, and how tokens are read
    of what it gives. `join` takes an embedding and a hidden row, both normed, beside each other."""

    embed_VH: Tensor | GgmlRows
    embedding_norm_H: Tensor
    hidden_norm_H: Tensor
    last_norm_H: Tensor
    join: PackedLinear
    head: PackedLinear
    eps: float
    logit_scale: float


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What is in front of a model's layers and behind them, where tokens are the likeliest ones."""

    embed_VH: Tensor | GgmlRows
    last_norm_H: Tensor
    last_bias_H: Tensor | None
    centred: bool
    head: PackedLinear
    eps: float
    embedding_scale: float
    logit_scale: float
    logit_cap: float | None


class Decoded(NamedTuple):
    """By pass and sequence the likeliest token, of those passes that gave every sequence one; what the routers chose
    (int32), and the seconds that shared and routed experts took. `spoiled`: a pass behind them did not."""

    token_PS: Tensor
    expert_PLSK: Tensor
    ffn_seconds: float
    spoiled: bool


class StepDecoder(ABC):
    """Greedy steps, one behind the other, in one call: what `Ops.run_stack` and `Ops.argmax` give, pass after pass."""

    @abstractmethod
    def decode_tokens(
        self,
        token_S: Tensor,
        groups: Sequence[PagedBatch],
        block_sizes: Sequence[int],
        passes: int,
        stops: Sequence[Sequence[int]],
    ) -> Decoded:
        """`groups` are the first pass, of which each sequence has one row (its token is int64), by KV group; their
        block tables have room for all passes. The pass that gives a sequence one of its `stops` is the last one, and
        the call ends before one in which a row or a logit is not finite; keys, values and states may be written of
        that, and a state of before is lost then. Raises
        IndexError for a token, a position or a block that there is not."""


class Drafted(NamedTuple):
    """By sequence and place: the likeliest token, -1 behind a draft's end, and how likely the layer has it. Rows that
    the layer computed chose `expert_RK`, those of the first pass before the others."""

    token_SD: Tensor
    likely_SD: Tensor
    expert_RK: Tensor


class DraftChain(ABC):
    """Drafts of several tokens in one call: a pass over the rows of a step, then one row a sequence for each more."""

    @abstractmethod
    def draft_tokens(
        self,
        token_T: Tensor,
        hidden_TH: Tensor,
        batch: PagedBatch,
        ends_3S: Tensor,
        least: float,
        block_size: int,
    ) -> Drafted:
        """Row t is made of a hidden row and of the token behind it (int64). `ends_3S` (int32) has for each sequence the
        row that its draft begins behind, the position at which keys and values of the token there go, and how many
        tokens are drafted; its block table has room for all but the last of them. A draft ends where the product of its
        likelihoods falls below `least`. Raises IndexError for a token, a row, a position or a block that there is not.
        """


class Stack(ABC):
    """What a backend made of all layers, once per cache. It may hold addresses, and holds what they point at."""

    hidden: int

    def chain_drafts(self, parts: PredictorParts) -> DraftChain | None:
        """Of a stack that is the decoder layer of `parts`; None where the backend has no such call."""
        return None

    def open_decoder(self, parts: DecoderParts) -> StepDecoder | None:
        """Of a stack of all layers; None where the backend has no such call."""
        return None

    @abstractmethod
    def run_layers(
        self, x_TH: Tensor, groups: Sequence[PagedBatch], bad_T: Tensor | None, exchange: Exchange | None
    ) -> Stacked:
        """As `Ops.run_stack`."""
