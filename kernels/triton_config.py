"""Which tile sizes each Triton kernel uses, by operation, dtype and rows per expert.

Serving never autotunes: a table answers, so the first request costs what the thousandth does. Every entry names
where it comes from; "not measured" marks a default chosen from a chip's limits (shared memory, registers, waves of
programs) and checked only to compile for sm_90. `bench/kernels_cuda.py --tiles` prints what to put here instead.
"""

from dataclasses import dataclass, replace

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

    def fitting(self, shared: int, columns: int, itemsize: int) -> "Tile":
        """The same tile with no more pipeline stages than `shared` bytes hold; `columns` of weights are read a step."""
        step = (self.rows + columns) * self.depth * itemsize
        return replace(self, stages=max(1, min(self.stages, shared // step)))


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
        (32, ExpertTiles(Tile(32, 128, 128, 8, 4, 1), Tile(32, 128, 128, 4, 5, 1))),
        (128, ExpertTiles(Tile(64, 128, 128, 8, 3, 4), Tile(64, 128, 128, 4, 4, 4))),
        (1 << 30, ExpertTiles(Tile(128, 128, 128, 8, 3, 8), Tile(128, 128, 128, 8, 4, 8))),
    ),
    "fp32": ((1 << 30, ExpertTiles(Tile(16, 32, 32, 4, 2, 4), Tile(16, 32, 32, 4, 2, 4))),),
}


_ITEMSIZE = {"16-bit": 2, "fp8": 1, "fp32": 4}


def expert_tiles(kind: str, rows_per_expert: int, shared: int = 227 << 10) -> ExpertTiles:
    """Tiles for `kind` ("16-bit", "fp8", "fp32") when an expert gets about this many rows, on a chip whose programs
    may take `shared` bytes of shared memory."""
    tiles = next(tiles for most, tiles in _EXPERTS[kind] if rows_per_expert <= most)
    size = _ITEMSIZE[kind]
    return ExpertTiles(
        tiles.gate_up.fitting(shared, 2 * tiles.gate_up.columns, size),
        tiles.down.fitting(shared, tiles.down.columns, size),
    )


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`queries` rows (heads, for MLA) and `keys` positions a step; a context is cut into parts of at least `split`."""

    queries: int
    keys: int
    split: int
    warps: int
    stages: int
    source: str = NOT_MEASURED


# A block table's entry and then the rows it names: pipelining that chain by two tiles takes five stages.
_GQA_DECODE = AttentionTile(16, 64, 256, 4, 5)
_GQA_DECODE_WIDE = AttentionTile(16, 64, 256, 4, 4)
_GQA_CHUNK = AttentionTile(128, 64, 0, 8, 3)
_GQA_CHUNK_WIDE = AttentionTile(64, 32, 0, 8, 2)
_MLA_MANY_HEADS = AttentionTile(64, 64, 128, 8, 2)  # fewer keys a step rescale the values more often
_MLA = AttentionTile(16, 32, 128, 8, 5)
_PLAIN = AttentionTile(16, 32, 128, 4, 2)  # float32, or a chip with little shared memory


def gqa_tiles(head_size: int, itemsize: int, shared: int = 227 << 10) -> tuple[AttentionTile, AttentionTile]:
    """(decode, chunk) tiles."""
    if itemsize > 2 or shared < 96 << 10:
        return _PLAIN, _PLAIN
    return (_GQA_DECODE, _GQA_CHUNK) if head_size <= 128 else (_GQA_DECODE_WIDE, _GQA_CHUNK_WIDE)


def mla_tile(heads: int, itemsize: int, shared: int = 227 << 10) -> AttentionTile:
    """Many heads fill a matrix instruction of 64 rows, where a latent tile and its queries fit side by side."""
    if itemsize > 2 or shared < 96 << 10:
        return _PLAIN
    return _MLA_MANY_HEADS if heads > 32 and shared >= 216 << 10 else _MLA


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
