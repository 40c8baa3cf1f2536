"""An EAGLE-3 head over a cache: one decoder layer that sees the target's rows of an earlier position beside a token.

For position t what `fc` makes of the target's rows and the embedding of token t + 1 go in; the head gives token t + 2.
A further pass takes the layer's own output instead of the target's rows. Shapes: T rows, H hidden, D drafted tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.families.drafters.eagle import EagleSpec
from afserve.kernels.cache import LayerCache
from afserve.kernels.paged import PagedBatch
from afserve.models.beside import DraftHead, HeadTensors


class EagleHead(DraftHead):
    def __init__(self, tensors: HeadTensors, spec: EagleSpec) -> None:
        """Raises CheckpointError."""
        super().__init__(tensors)
        self._spec = spec
        (self._layer,), (stem,) = self.layers, tensors.stems
        self._hidden_norm = tensors.norm(f"{stem}.hidden_norm")
        self._joined_norm = tensors.norm("input_norm") if spec.joined_norm else None
        each = range(len(spec.behind) if spec.each_norm else 0)
        self._each_norm = [tensors.norm(f"fc_norm.{at}") for at in each]

    def fuse(self, seen: list[Tensor]) -> Tensor:
        """What its first pass begins with, of the rows that the target's layers gave, each (T, H)."""
        norm, eps = self._ops.rms_norm, self._eps
        if self._each_norm:
            seen = [norm(x_TH, weight_H, eps) for x_TH, weight_H in zip(seen, self._each_norm, strict=True)]
        joined = torch.cat(seen, 1)
        if self._joined_norm is not None:
            joined = norm(joined, self._joined_norm, eps)
        return self._ops.linear(joined, self._fc)

    def scores(self, hidden_SH: Tensor) -> Tensor:
        """Float32, (S, D), of rows that `pass_rows` gave."""
        return self.normed_scores(hidden_SH if self._spec.feeds_normed else self.last_normed(hidden_SH))

    def pass_rows(
        self, token_T: Tensor, hidden_TH: Tensor, caches: Sequence[LayerCache], batch: PagedBatch
    ) -> Tensor:
        """What `scores` reads, and the next pass goes on with; `hidden_TH` stays as it is."""
        (cache,), (both_TX, normed_TH) = caches, self._entered(token_T, hidden_TH)
        x_TH = normed_TH if self._spec.residual_normed else hidden_TH.clone()
        self._layer.run(x_TH, both_TX, cache, batch, batch)
        return self.last_normed(x_TH) if self._spec.feeds_normed else x_TH

    def keep_keys(
        self, token_T: Tensor, hidden_TH: Tensor, caches: Sequence[LayerCache], batch: PagedBatch
    ) -> None:
        """Writes what `pass_rows` writes of these rows."""
        (cache,), (both_TX, _) = caches, self._entered(token_T, hidden_TH)
        self._layer.keep_keys(both_TX, cache, batch.position_T, batch.kv_slot_T)

    def _entered(self, token_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values read, (T, 2 H), and the second half of it."""
        normed_TH = self._ops.rms_norm(hidden_TH, self._hidden_norm, self._eps)
        embedded_TH = self._ops.rms_norm(self.embed(token_T), self._layer.input_norm_H, self._eps)
        return torch.cat((embedded_TH, normed_TH), 1), normed_TH
