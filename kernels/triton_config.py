"""Which tile sizes each Triton kernel uses, by operation, dtype and rows per expert.

Serving never autotunes: a table answers, so the first request costs what the thousandth does. Every entry names
where it comes from; "not measured" marks a default chosen from the chip's limits (shared memory, registers, one wave
of programs) and checked only to compile for sm_90 without spilling. `bench/kernels_cuda.py` prints what to put here.
"""

from dataclasses import dataclass

NOT_MEASURED = "not measured"
FUSED = {
    "enable_fp_fusion": True
}  # with every launch: a * b + c may be one rounding (Triton 3.10 changes the default)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share of a matrix product: rows x columns of the result, `depth` of the inner dimension a step.

    `warps` and `stages` are the launch's; `band` row tiles are visited before moving on, to reuse weights in L2.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    band: int = 8
    source: str = NOT_MEASURED


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


# (most rows per expert, tiles), ascending; the last one takes everything larger. gate_up keeps two accumulators.
_EXPERTS: dict[str, tuple[tuple[int, ExpertTiles], ...]] = {
    "16-bit": (
        (16, ExpertTiles(Tile(16, 64, 128, 4, 4, 1), Tile(16, 64, 128, 4, 5, 1))),
        (32, ExpertTiles(Tile(32, 64, 128, 4, 4, 1), Tile(32, 64, 128, 4, 5, 1))),
        (128, ExpertTiles(Tile(64, 64, 64, 4, 4, 4), Tile(64, 128, 64, 4, 4, 4))),
        (1 << 30, ExpertTiles(Tile(128, 128, 64, 8, 3, 8), Tile(128, 256, 64, 8, 3, 8))),
    ),
    # With 128x128 weight scales one step is one scale block, and a re-quantised group is one column tile.
    "fp8": (
        (16, ExpertTiles(Tile(16, 128, 128, 4, 4, 1), Tile(16, 128, 128, 4, 5, 1))),
        (32, ExpertTiles(Tile(32, 128, 128, 4, 4, 1), Tile(32, 128, 128, 4, 5, 1))),
        (128, ExpertTiles(Tile(64, 128, 128, 8, 3, 4), Tile(64, 128, 128, 4, 4, 4))),
        (1 << 30, ExpertTiles(Tile(128, 128, 128, 8, 3, 8), Tile(128, 128, 128, 8, 4, 8))),
    ),
    "fp32": ((1 << 30, ExpertTiles(Tile(16, 32, 32, 4, 2, 4), Tile(16, 32, 32, 4, 2, 4))),),
}


def expert_tiles(kind: str, rows_per_expert: int) -> ExpertTiles:
    """Tiles for `kind` ("16-bit", "fp8", "fp32") when an expert gets about this many rows."""
    return next(tiles for most, tiles in _EXPERTS[kind] if rows_per_expert <= most)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`queries` rows and `keys` positions a step; decode cuts a context into parts of at least `split` positions."""

    queries: int
    keys: int
    split: int
    warps: int
    stages: int
    source: str = NOT_MEASURED


GQA_DECODE = AttentionTile(16, 64, 256, 4, 3)
GQA_PREFILL = AttentionTile(128, 64, 0, 8, 3)
GQA_PREFILL_WIDE = AttentionTile(64, 32, 0, 8, 2)  # head sizes above 128
MLA = AttentionTile(64, 32, 128, 8, 2)
MLA_FEW_HEADS = AttentionTile(16, 32, 128, 4, 3)


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


ROUTER = RouterTile(16, 32, 128, 4)
