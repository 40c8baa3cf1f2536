"""What the optimizer answers: slots, shares, and a certificate of how good they are. Values; it knows no algorithm."""

from dataclasses import dataclass

from afserve.placement.optimizer.problem import Floats, Ints
from afserve.placement.placement import LayerPlacement, Placement


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the plan reaches and what no plan can beat, per layer: rows per unit of speed on the fullest node.

    `max_load` holds under the plan's own shares; `lower_bound` is proved in `bound.py`; with several scenarios
    both are weighted means. `seconds` and `seconds_bound` say the same in a time model. `gain` is the fraction
    of the summed largest loads (or seconds) saved against what stands, `moves` the experts that travel,
    `busiest` those into one node.
    """

    max_load: tuple[float, ...]
    lower_bound: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    seconds_bound: tuple[float, ...] = ()
    moves: int = 0
    busiest: int = 0
    gain: float = 0.0
    move_seconds: float = 0.0
    worth_moving: bool = True
    reason: str = "a placement from nothing"

    @property
    def gap(self) -> float:
        """How far the summed maxima are above their bound; 0 is optimal."""
        reached, bound = (
            (self.seconds, self.seconds_bound) if self.seconds else (self.max_load, self.lower_bound)
        )
        return sum(reached) / sum(bound) - 1.0 if sum(bound) > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Balanced:
    """slot_LNS holds experts (FREE = empty), share_LNS their parts of the rows, width_LN the slots in use."""

    slot_LNS: Ints
    share_LNS: Floats
    width_LN: Ints
    experts: int
    certificate: Certificate

    def placement(self, epoch: int = 0) -> Placement:
        proof, layers = self.certificate, []
        tables = zip(self.slot_LNS.tolist(), self.share_LNS.tolist(), self.width_LN.tolist(), strict=True)
        for number, (slots, shares, widths) in enumerate(tables):
            rows = tuple(tuple(row[:w]) for row, w in zip(slots, widths, strict=True))
            parts = tuple(tuple(row[:w]) for row, w in zip(shares, widths, strict=True))
            layers.append(LayerPlacement(rows, parts, proof.max_load[number], proof.lower_bound[number]))
        return Placement(epoch, len(self.width_LN[0]), self.experts, tuple(layers))
