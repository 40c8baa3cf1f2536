"""A DFlash head over a cache: a few decoder layers that guess all places of a block of tokens in one pass.

Each layer keeps keys and values of what `fc` and a norm make of the target's rows, at their own positions. The rows of
a block, the newest token's and those of masks, attend these and each other. Shapes: T rows of the target, R rows of
blocks, S those of them that guess, H hidden, D drafted tokens.
"""

from collections.abc import Sequence
from itertools import islice, takewhile

import torch
from torch import Tensor

from afserve.drafts import Guess
from afserve.families.drafters.dflash import DflashSpec
from afserve.kernels.cache import LayerCache
from afserve.kernels.paged import PagedBatch, unmasked
from afserve.models.beside import DraftHead, HeadTensors

SCORED = 64  # rows at a time: each has a score for every token


class DflashHead(DraftHead):
    def __init__(self, tensors: HeadTensors, spec: DflashSpec) -> None:
        """Raises CheckpointError."""
        super().__init__(tensors)
        self.spec = spec
        self._hidden_norm, self._target_norm = tensors.norm("hidden_norm"), tensors.beside.normed

    def keep_context(self, seen: list[Tensor], caches: Sequence[LayerCache], batch: PagedBatch) -> None:
        """Writes the keys and values of a step's rows, which the target's layers gave, each (T, H)."""
        pairs = zip(seen, self.spec.normed, strict=True)
        seen = [self._target_norm(x_TH) if normed else x_TH for x_TH, normed in pairs]
        fused_TH = self._ops.linear(torch.cat(seen, 1), self._fc)
        context_TH = self._ops.rms_norm(fused_TH, self._hidden_norm, self._eps)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.keep_keys(context_TH, cache, batch.position_T, batch.kv_slot_T)

    def block_rows(self, token_R: Tensor, caches: Sequence[LayerCache], blocks: PagedBatch) -> Tensor:
        """What `guesses` reads, (R, H), of rows that are the last of their sequences' contexts."""
        x_RH = self.embed(token_R)
        if self.spec.scale != 1.0:
            x_RH *= self.spec.scale
        batch, whole = self._ops.bind_batch(blocks), self._ops.bind_batch(unmasked(blocks))
        for layer, cache, causal in zip(self.layers, caches, self.spec.causal, strict=True):
            normed_RH = self._ops.rms_norm(x_RH, layer.input_norm_H, self._eps)
            layer.run(x_RH, normed_RH, cache, batch, batch if causal else whole)
        return self.last_normed(x_RH)

    def guesses(
        self, normed_RH: Tensor, places: Sequence[Sequence[int]], newest: Sequence[int]
    ) -> list[list[Guess]]:
        """Of each block what its rows `places` guess, behind its `newest` token, up to the first that is none."""
        found = iter(self.likeliest(normed_RH, [row for rows in places for row in rows]))
        return [list(takewhile(lambda one: one.token >= 0, [*islice(found, len(rows))])) for rows in places]

    def likeliest(self, normed_RH: Tensor, rows: list[int]) -> list[Guess]:
        """What each of these rows guesses by itself."""
        found = list[Guess]()
        for row_S in torch.tensor(rows, device=normed_RH.device).split(SCORED):
            found += self.chosen(self.normed_scores(normed_RH[row_S]))
        return found

    def chosen(self, scores_SD: Tensor, chance_S: Tensor | None = None) -> list[Guess]:
        """The highest of each row; how likely it is right by the scores where nobody else says it."""
        chance_S = scores_SD.softmax(1).amax(1) if chance_S is None else chance_S
        tokens = self.target_ids(self._ops.argmax(scores_SD).tolist())
        return [*map(Guess, tokens, chance_S.tolist())]
