"""What a tile is, for each kind of Triton kernel: one program's share of the work, and its launch's warps and stages.

Which tile a launch takes is `triton/tiles.py`'s to say. Every tile names where it comes from.
"""

from dataclasses import dataclass, replace

NOT_MEASURED = "unmeasured default"
FUSED = {"enable_fp_fusion": True}  # a * b + c may be one rounding (Triton 3.10 changes the default)


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a matrix product: rows x columns of the result, `depth` of the inner dimension a step.

    `band` row tiles are visited before moving on, to reuse weights in L2.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    band: int = 8
    source: str = NOT_MEASURED

    def fitting(self, shared: int, columns: int, itemsize: int) -> "Tile":
        """The same tile with no more pipeline stages than `shared` bytes hold; `columns` of weights are read a step."""
        step = (self.rows + columns) * self.depth * itemsize
        stages = max(1, min(self.stages, shared // step))
        return self if stages == self.stages else replace(self, stages=stages)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The two products of the expert FFN. Both walk the same padded row tiles, so `rows` must agree."""

    gate_up: Tile
    down: Tile

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows, "gate_up and down share one row plan"

    @property
    def rows(self) -> int:
        return self.gate_up.rows

    @property
    def source(self) -> str:
        return self.gate_up.source


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`queries` rows (heads, for MLA) and `keys` positions a step; a context is cut into parts of at least `split`."""

    queries: int
    keys: int
    split: int
    warps: int
    stages: int
    source: str = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class RouterTile:
    """One program's tokens x experts, `depth` of the hidden size a step, the hidden size in at most `parts`."""

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int = 4
    stages: int = 3
    source: str = NOT_MEASURED
