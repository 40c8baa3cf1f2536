"""What heads that stand beside a model and draft for it are made of: their tensors, their decoder layers over a cache,
and their two ends. The kinds of heads are in `drafters/`.

Shapes: T rows, S rows that are drafted from, H hidden, X what queries, keys and values read, D drafted tokens.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.families.drafters.heads import EMBEDDING, HEAD, TO_TARGET, HeadSpec, check_tensors
from afserve.kernels.cache import LayerCache, LayerShape
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.models.dense import Dense
from afserve.models.rope import Rotary, head_tables
from afserve.models.shards import stored_shapes
from afserve.models.weights import Checkpoint
from afserve.spec_parts import LayerSpec


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head takes from the model beside which it stands: its ops and numbers, rows of words (T -> T x H) and
    the LM head for a head without its own, whose scores nothing scales, and its last norm."""

    ops: Ops
    dtype: torch.dtype
    positions: int
    dense: Dense
    words: Callable[[Tensor], Tensor]
    head: PackedLinear
    normed: Callable[[Tensor], Tensor]


class HeadTensors:
    """A head's, read by name. Raises CheckpointError for one that is not as `spec` has it."""

    def __init__(self, folder: str, spec: HeadSpec, beside: TargetParts) -> None:
        self._shapes = stored_shapes(Path(folder))
        check_tensors(folder, spec, self._shapes)
        self.folder, self.spec, self.beside = folder, spec, beside
        self.stems = spec.stems(self._shapes)
        self._wanted = {**spec.needed_tensors(self.stems), **spec.further()}
        self._source = Checkpoint(folder, device=beside.ops.device)
        self.norms: list[Tensor] = []

    def has(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> Tensor:
        return self._source.tensor(name, self._wanted[name], self.beside.dtype)

    def norm(self, name: str) -> Tensor:
        self.norms.append(self.read(f"{name}.weight"))
        return self.norms[-1]

    def linear(self, *names: str) -> PackedLinear:
        """One map of all outputs of these, with their biases where they have any."""
        biases = [self.read(f"{name}.bias") for name in names if f"{name}.bias" in self._wanted]
        weights = [self.read(f"{name}.weight") for name in names]
        return self.beside.dense.linear(torch.cat(weights), bias_O=torch.cat(biases) if biases else None)

    def target_ids(self) -> Tensor:
        """(D,) int64 on the host: the target's id of each drafted token."""
        spec, target_D = self.spec, torch.arange(self.spec.draft_vocab)
        if self.has(TO_TARGET):
            target_D = target_D + self._source.whole_numbers(TO_TARGET, spec.draft_vocab).cpu()
        if target_D.min() < 0 or target_D.max() >= spec.vocab_size:
            raise CheckpointError(
                f"{self.folder}: {TO_TARGET} names tokens from {int(target_D.min())} to {int(target_D.max())}, "
                f"the model has {spec.vocab_size}"
            )
        return target_D


class HeadLayer:
    """`keeps`: what it writes to a cache."""

    def __init__(self, tensors: HeadTensors, stem: str, layer: LayerSpec, rope: Rotary) -> None:
        a, attention = layer.attention, f"{stem}.self_attn"
        self._ops, self._eps, self._attention, self._rope = tensors.beside.ops, tensors.spec.eps, a, rope
        self.keeps = LayerShape(a.kv_heads, a.head_dim, a.head_dim)
        self._q = tensors.linear(f"{attention}.q_proj")
        self._kv = tensors.linear(f"{attention}.k_proj", f"{attention}.v_proj")
        self._out = tensors.linear(f"{attention}.o_proj")
        self._q_norm, self._k_norm = (
            tensors.norm(f"{attention}.{name}") if a.qk_norm else None for name in ("q_norm", "k_norm")
        )
        self._gate_up = tensors.linear(f"{stem}.mlp.gate_proj", f"{stem}.mlp.up_proj")
        self._down = tensors.linear(f"{stem}.mlp.down_proj")
        self.input_norm_H = tensors.norm(f"{stem}.input_layernorm")
        self._post_norm_H = tensors.norm(f"{stem}.post_attention_layernorm")

    def keep_keys(self, x_TX: Tensor, cache: LayerCache, position_T: Tensor, kv_slot_T: Tensor) -> None:
        """Writes the rows' keys and values."""
        k_NGBD, v_NGBD = cache
        k, v = self._ops.linear(x_TX, self._kv).chunk(2, 1)
        k, v = self._turned(k, self._k_norm, position_T), v.unflatten(1, (-1, self._attention.head_dim))
        self._ops.write_kv(k, v, k_NGBD, v_NGBD, kv_slot_T)

    def run(
        self, x_TH: Tensor, normed_TX: Tensor, cache: LayerCache, batch: PagedBatch, seen: PagedBatch
    ) -> None:
        """Changes x_TH in place. The rows see what `seen` says, which are those of `batch`, or as many."""
        ops, a = self._ops, self._attention
        self.keep_keys(normed_TX, cache, batch.position_T, batch.kv_slot_T)
        q = self._turned(ops.linear(normed_TX, self._q), self._q_norm, batch.position_T)
        k_NGBD, v_NGBD = cache
        seen_TAD = ops.attend_gqa(q, k_NGBD, v_NGBD, seen, a.head_dim**-0.5, a.window)
        attended_TH = ops.linear(seen_TAD.flatten(1), self._out)
        post_TH = ops.add_rms_norm(x_TH, attended_TH, self._post_norm_H, self._eps)
        x_TH += ops.mlp(post_TH, self._gate_up, self._down)

    def _turned(self, heads: Tensor, norm_D: Tensor | None, position_T: Tensor) -> Tensor:
        x = heads.unflatten(1, (-1, self._attention.head_dim))
        x = x if norm_D is None else self._ops.rms_norm(x, norm_D, self._eps)
        return self._ops.rope(x, self._rope.cos_PD, self._rope.sin_PD, position_T, False)


class DraftHead:
    """What all kinds of heads share; `keeps` is what its layers write to a cache."""

    def __init__(self, tensors: HeadTensors) -> None:
        beside, spec = tensors.beside, tensors.spec
        self.behind, self._norms = spec.behind, tensors.norms
        self._ops, self._eps = beside.ops, spec.eps
        rope = head_tables(spec.attention, beside.positions, beside.dtype, beside.ops.device)
        pairs = zip(tensors.stems, spec.layers, strict=True)
        self.layers = [HeadLayer(tensors, stem, layer, rope) for stem, layer in pairs]
        self.keeps = [layer.keeps for layer in self.layers]
        self._fc, self._last_norm = tensors.linear("fc"), tensors.norm("norm")
        own_VH = tensors.read(EMBEDDING) if tensors.has(EMBEDDING) else None
        self._words = beside.words if own_VH is None else partial(torch.index_select, own_VH, 0)
        self._head = tensors.linear(HEAD.removesuffix(".weight")) if tensors.has(HEAD) else beside.head
        self._alike = repr(spec)
        self._target_D = tensors.target_ids()

    @property
    def identity(self) -> str:
        """Hex digits that two heads share which were trained alike; by their norms, and what config.json says."""
        numbers = torch.cat([norm_H.float().cpu() for norm_H in self._norms]).numpy().tobytes()
        return hashlib.blake2b(numbers + self._alike.encode(), digest_size=16).hexdigest()

    def embed(self, token_T: Tensor) -> Tensor:
        """Fresh rows."""
        return self._words(token_T)

    def last_normed(self, x_TH: Tensor) -> Tensor:
        return self._ops.rms_norm(x_TH, self._last_norm, self._eps)

    def normed_scores(self, normed_SH: Tensor) -> Tensor:
        """Float32, (S, D), of rows after the last norm; with the model's LM head where it has none."""
        return self._ops.logits(normed_SH, self._head)

    def target_ids(self, drafted: list[int]) -> list[int]:
        """The target's ids of the head's; -1 stays."""
        return [token if token < 0 else int(self._target_D[token]) for token in drafted]
