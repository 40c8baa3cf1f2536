"""An EAGLE-3 head over a cache: one decoder layer that sees the target's rows of an earlier position beside a token.

For position t what `fc` makes of the target's rows and the embedding of token t + 1 go in; the head gives token t + 2.
A further pass takes the layer's own output instead of the target's rows. Shapes: T rows, H hidden, D drafted tokens.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.families.drafters.eagle import EMBEDDING, TO_TARGET, EagleSpec, check_tensors, stem_of
from afserve.kernels.cache import LayerCache, LayerShape
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.dense import Dense
from afserve.models.rope import head_tables
from afserve.models.shards import stored_shapes
from afserve.models.weights import Checkpoint

_PARTS = ("q_proj", "k_proj", "v_proj")


class EagleHead:
    """`keeps`: what its layer writes to a cache."""

    def __init__(
        self,
        folder: str,
        spec: EagleSpec,
        ops: Ops,
        dtype: torch.dtype,
        positions: int,
        dense: Dense,
        embed_VH: Tensor,
    ) -> None:
        """`embed_VH` is the target's, for a head without its own. Raises CheckpointError."""
        shapes = stored_shapes(Path(folder))
        check_tensors(folder, spec, shapes)
        source, stem = Checkpoint(folder, device=ops.device), stem_of(shapes)
        wanted = {**spec.tensors(stem), **spec.further()}

        def read(name: str) -> Tensor:
            return source.tensor(name, wanted[name], dtype)

        def stacked(part: str, names: tuple[str, ...], what: str = "weight") -> Tensor:
            return torch.cat([read(f"{stem}.{part}.{name}.{what}") for name in names])

        a, attention = spec.attention, f"{stem}.self_attn"
        self.spec, self._ops = spec, ops
        self.keeps = LayerShape(a.kv_heads, a.head_dim, a.head_dim)
        bias = stacked("self_attn", _PARTS, "bias") if a.qkv_bias else None
        self._qkv = dense.linear(stacked("self_attn", _PARTS), bias_O=bias)
        out_bias = read(f"{attention}.o_proj.bias") if a.qkv_bias else None
        self._out = dense.linear(read(f"{attention}.o_proj.weight"), bias_O=out_bias)
        both = ("q_norm", "k_norm") if a.qk_norm else ()
        self._head_norms = tuple(read(f"{attention}.{name}.weight") for name in both)
        self._gate_up = dense.linear(stacked("mlp", ("gate_proj", "up_proj")))
        self._down = dense.linear(read(f"{stem}.mlp.down_proj.weight"))
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self._input_norm, self._hidden_norm, self._post_norm = (read(f"{stem}.{n}.weight") for n in norms)
        self._fc, self._last_norm = dense.linear(read("fc.weight")), read("norm.weight")
        self._joined_norm = read("input_norm.weight") if spec.joined_norm else None
        each = range(len(spec.behind) if spec.each_norm else 0)
        self._each_norm = [read(f"fc_norm.{at}.weight") for at in each]
        self._head = dense.linear(read("lm_head.weight"))
        self._embed_VH = read(EMBEDDING) if EMBEDDING in shapes else embed_VH
        self._rope = head_tables(a, positions, dtype, ops.device)
        self._target_D = torch.arange(spec.draft_vocab)
        if TO_TARGET in shapes:
            self._target_D = self._target_D + source.whole_numbers(TO_TARGET, spec.draft_vocab).cpu()
        if self._target_D.min() < 0 or self._target_D.max() >= spec.vocab_size:
            raise CheckpointError(
                f"{folder}: {TO_TARGET} names tokens from {int(self._target_D.min())} to {int(self._target_D.max())}, "
                f"the model has {spec.vocab_size}"
            )

    @property
    def identity(self) -> str:
        """Hex digits that two heads share which were trained alike; by their norms."""
        norms = (self._input_norm, self._hidden_norm, self._post_norm, self._last_norm)
        numbers = torch.cat([norm_H.float().cpu() for norm_H in norms]).numpy().tobytes()
        return hashlib.blake2b(numbers, digest_size=16).hexdigest()

    def bind(self, cache: LayerCache) -> "BoundEagle":
        k_NGBD, v_NGBD = cache
        return BoundEagle(self, k_NGBD, v_NGBD)

    def fuse(self, seen: list[Tensor]) -> Tensor:
        """What its first pass begins with, of the rows that the target's layers gave, each (T, H)."""
        norm, eps = self._ops.rms_norm, self.spec.eps
        if self._each_norm:
            seen = [norm(x_TH, weight_H, eps) for x_TH, weight_H in zip(seen, self._each_norm, strict=True)]
        joined = torch.cat(seen, 1)
        if self._joined_norm is not None:
            joined = norm(joined, self._joined_norm, eps)
        return self._ops.linear(joined, self._fc)

    def scores(self, hidden_SH: Tensor) -> Tensor:
        """Float32, (S, D), of rows that `pass_rows` gave."""
        if not self.spec.feeds_normed:
            hidden_SH = self._ops.rms_norm(hidden_SH, self._last_norm, self.spec.eps)
        return self._ops.logits(hidden_SH, self._head)

    def target_ids(self, drafted: list[int]) -> list[int]:
        """The target's ids of the head's; -1 stays."""
        return [token if token < 0 else int(self._target_D[token]) for token in drafted]

    def pass_rows(
        self, token_T: Tensor, hidden_TH: Tensor, cache: tuple[Tensor, Tensor], batch: PagedBatch
    ) -> Tensor:
        """What `scores` reads, and the next pass goes on with; `hidden_TH` stays as it is."""
        ops, eps, a = self._ops, self.spec.eps, self.spec.attention
        embedded_TH = torch.index_select(self._embed_VH, 0, token_T)
        normed_TH = ops.rms_norm(hidden_TH, self._hidden_norm, eps)
        both = torch.cat((ops.rms_norm(embedded_TH, self._input_norm, eps), normed_TH), 1)
        sizes = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim
        q, k, v = (
            part.unflatten(1, (-1, a.head_dim)) for part in ops.linear(both, self._qkv).split(sizes, 1)
        )
        if self._head_norms:
            q, k = (
                ops.rms_norm(x, weight_D, eps) for x, weight_D in zip((q, k), self._head_norms, strict=True)
            )
        cos_PD, sin_PD = self._rope.cos_PD, self._rope.sin_PD
        q, k = (ops.rope(x, cos_PD, sin_PD, batch.position_T, False) for x in (q, k))
        ops.write_kv(k, v, *cache, batch.kv_slot_T)
        seen_TAD = ops.attend_gqa(q, *cache, batch, a.head_dim**-0.5)
        x_TH = normed_TH if self.spec.residual_normed else hidden_TH.clone()
        attended_TH = ops.linear(seen_TAD.flatten(1), self._out)
        post_TH = ops.add_rms_norm(x_TH, attended_TH, self._post_norm, eps)
        x_TH += ops.mlp(post_TH, self._gate_up, self._down)
        return ops.rms_norm(x_TH, self._last_norm, eps) if self.spec.feeds_normed else x_TH


class BoundEagle:
    """A head with its layer's part of one cache."""

    def __init__(self, head: EagleHead, k_NGBD: Tensor, v_NGBD: Tensor) -> None:
        self.head = head
        self._cache = k_NGBD, v_NGBD

    def pass_rows(self, token_T: Tensor, hidden_TH: Tensor, batch: PagedBatch) -> Tensor:
        return self.head.pass_rows(token_T, hidden_TH, self._cache, batch)
