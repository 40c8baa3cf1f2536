"""A DSpark head over a cache: a DFlash head of which one pass gives the rows of all places, and the token that was
guessed for a place has a say in the next one's.

Shapes: R rows of blocks, S rows of one place, H hidden, K rank of the Markov head, X what the confidence head reads,
V tokens of the target, D drafted tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.drafts import Guess
from afserve.families.drafters.dspark import AFTER, BEFORE, SURE, DsparkSpec
from afserve.models.beside import HeadTensors
from afserve.models.drafters.dflash import SCORED, DflashHead


class DsparkHead(DflashHead):
    def __init__(self, tensors: HeadTensors, spec: DsparkSpec) -> None:
        """Raises CheckpointError."""
        super().__init__(tensors, spec)
        self._before_VK = tensors.read(f"{BEFORE}.weight") if spec.rank else None
        self._after = tensors.linear(AFTER) if spec.rank else None
        self._sure = None
        if spec.sure:
            self._sure = tensors.read(f"{SURE}.weight")[0].float(), tensors.read(f"{SURE}.bias").float()

    def guesses(
        self, normed_RH: Tensor, places: Sequence[Sequence[int]], newest: Sequence[int]
    ) -> list[list[Guess]]:
        found: list[list[Guess]] = [[] for _ in places]
        for place in range(max(map(len, places))):
            live = [at for at, rows in enumerate(places) if place < len(rows) and len(found[at]) == place]
            for first in range(0, len(live), SCORED):
                part = live[first : first + SCORED]
                rows = [places[at][place] for at in part]
                before = [found[at][-1].token if place else newest[at] for at in part]
                for at, guess in zip(part, self._of_place(normed_RH, rows, before), strict=True):
                    found[at] += [guess] if guess.token >= 0 else []
        return found

    def _of_place(self, normed_RH: Tensor, rows: list[int], before: list[int]) -> list[Guess]:
        """One of each of these rows, behind a token each."""
        row_SX = normed_RH[torch.tensor(rows, device=normed_RH.device)]
        scores_SD = self.normed_scores(row_SX)
        if self._before_VK is not None and self._after is not None:
            before_SK = self._before_VK[torch.tensor(before, device=row_SX.device)]
            scores_SD += self._ops.logits(before_SK, self._after)
            row_SX = torch.cat((row_SX, before_SK), 1)
        if self._sure is None:
            return self.chosen(scores_SD)
        weight_X, bias_1 = self._sure
        return self.chosen(scores_SD, (row_SX[:, : len(weight_X)].float() @ weight_X + bias_1).sigmoid())
