"""Which rows of a step met a value that is not finite, and in which layer first. One per micro-batch.

The kernels that add a layer's sums mark rows as they go (`Ops.add_sums`), so nothing is read twice. The marks are
looked at once per step, after sampling has waited for the device anyway. Shapes: T tokens of the step.
"""

import torch
from torch import Tensor

from afserve.engine.request import NOT_FINITE
from afserve.engine.step_plan import StepPlan

FINE = -1


class Spoiled:
    def __init__(self, most_tokens: int, device: torch.device) -> None:
        self._layer_N = torch.full((most_tokens,), FINE, dtype=torch.int32, device=device)
        self._layer_T = self._layer_N[:0]

    def of(self, token_T: Tensor) -> Tensor:
        """The marks of a step's rows, all fine yet; `failures` has reset them since the last step."""
        self._layer_T = self._layer_N[: token_T.shape[0]]
        return self._layer_T

    def failures(self, plan: StepPlan) -> dict[int, str]:
        """Why a chunk gave nothing, by its index in the plan; the next step begins without marks.

        The first row of a sequence that was spoiled names the layer: later ones may have it from the first's keys.
        """
        layers = self._layer_T.tolist()
        if max(layers) == FINE:
            return {}
        self._layer_T.fill_(FINE)
        found, start = {}, 0
        for index, chunk in enumerate(plan.chunks):
            worst = next((n for n in layers[start : start + chunk.count] if n != FINE), None)
            start += chunk.count
            if worst is not None:
                found[index] = NOT_FINITE.format(where=f"layer {worst}")
        return found
