"""What a link says whose host has a part in every layer of a step."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Fold = Callable[[Tensor, Tensor | None, Tensor | None, int], None]  # x_TH, shared_TH, bad_T, layer


class Unrecorded:
    """Its steps cannot be recorded, and none is to be run again."""

    def held(self, micro_batch: int, *, done: bool = False) -> bool:
        return True

    def prepare(self, micro_batch: int) -> object | None:
        return None

    def replayed(self, micro_batch: int) -> None:
        """Nothing was sent."""

    def folding(self, ticket: Any) -> Fold | None:
        return None
