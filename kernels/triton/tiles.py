"""Which tile each Triton kernel takes, by operation and size: defaults here, what was measured in `tiles.json`.

Serving never autotunes: a table answers, so the first request costs what the thousandth does. A default is chosen from
a chip's limits (shared memory, registers, waves of programs), checked only to compile, and calls itself
"unmeasured default". `python -m bench.kernels_cuda --search` measures on the chip at hand and writes the file, whose
rows count on that chip alone. An absent file means that nothing was measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from afserve.kernels.triton.config import NOT_MEASURED, AttentionTile, ExpertTiles, RouterTile, Tile

MEASURED = Path(__file__).parent / "tiles.json"
ALL = 1 << 30
SHARED = 227 << 10  # bytes that one program may take on a Hopper chip
AnyTile = ExpertTiles | AttentionTile | RouterTile
T = TypeVar("T", bound=AnyTile)
Table = Mapping[str, tuple[tuple[int, AnyTile], ...]]

_PLAIN = AttentionTile(16, 32, 128, 4, 2)  # float32, or a chip with little shared memory
_FEW_HEADS = AttentionTile(16, 32, 128, 8, 5)
_OF_CODES = AttentionTile(32, 32, 128, 8, 3)  # latents widened in registers; 64 heads spill in the loop
_FEW_QUERIES = AttentionTile(64, 32, 0, 4, 2)
_FOUR_BITS = ExpertTiles(Tile(64, 64, 64, 8, 3, 8), Tile(64, 64, 64, 8, 3, 8))

# By operation: (largest size, tile), ascending; the last one takes everything larger.
DEFAULTS: Table = {
    # By rows per expert. gate_up keeps two accumulators.
    "experts 16-bit": (
        (16, ExpertTiles(Tile(16, 64, 128, 4, 4, 1), Tile(16, 64, 128, 4, 5, 1))),
        (32, ExpertTiles(Tile(32, 64, 128, 4, 4, 1), Tile(32, 64, 128, 4, 5, 1))),
        (128, ExpertTiles(Tile(64, 64, 64, 4, 4, 4), Tile(64, 128, 64, 4, 4, 4))),
        (ALL, ExpertTiles(Tile(128, 128, 64, 8, 3, 8), Tile(128, 256, 64, 8, 3, 8))),
    ),
    # With 128x128 weight scales one step is one scale block, and a re-quantised group is one column tile.
    "experts fp8": (
        (16, ExpertTiles(Tile(16, 128, 128, 4, 4, 1), Tile(16, 128, 128, 4, 5, 1))),
        (32, ExpertTiles(Tile(32, 128, 128, 8, 4, 1), Tile(32, 128, 128, 4, 5, 1))),
        (128, ExpertTiles(Tile(64, 128, 128, 8, 3, 4), Tile(64, 128, 128, 4, 4, 4))),
        # 128 rows of gate and of up, and the product that their scales are for, do not fit a program's registers.
        (ALL, ExpertTiles(Tile(64, 128, 128, 8, 3, 8), Tile(64, 128, 128, 8, 4, 8))),
    ),
    "experts fp32": ((ALL, ExpertTiles(Tile(16, 32, 32, 4, 2, 4), Tile(16, 32, 32, 4, 2, 4))),),
    # By head size. A block table's entry and then the rows it names: pipelining that by two tiles takes five stages.
    "gqa decode": ((128, AttentionTile(16, 64, 256, 4, 5)), (ALL, AttentionTile(16, 64, 256, 4, 4))),
    "gqa chunk": ((128, AttentionTile(128, 64, 0, 8, 3)), (ALL, AttentionTile(64, 32, 0, 8, 2))),
    # By query heads. Many fill a matrix instruction of 64 rows; fewer keys a step rescale the values more often.
    "mla": ((32, _FEW_HEADS), (ALL, AttentionTile(64, 64, 128, 8, 2))),
    # Queries of one head, whose keys and values are its own.
    "mla prompt": ((ALL, AttentionTile(128, 64, 0, 8, 3)),),
    "router": ((ALL, RouterTile(16, 32, 128, 4)),),
}
_ITEMSIZE = {"experts 16-bit": 2, "experts fp8": 1, "experts fp32": 4}


@dataclass(frozen=True, slots=True)
class TileTable:
    """Looks tiles up; `shared` is how many bytes of shared memory a program may take on the chip. `tensor_memory`: sums
    of its largest matrix instructions lie in a memory of their own (Blackwell, capability 10)."""

    shared: int = SHARED
    table: Table = field(default_factory=lambda: DEFAULTS)
    tensor_memory: bool = False

    @classmethod
    def of_chip(
        cls, chip: str, shared: int, measured: Path = MEASURED, tensor_memory: bool = False
    ) -> "TileTable":
        """The defaults, with what was measured on this chip in their places."""
        rows = json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else []
        table = {op: dict(steps) for op, steps in DEFAULTS.items()}
        for row in rows:
            if row["chip"] == chip:
                assert row["most"] in table[row["op"]], f"{measured}: no step {row['most']} of {row['op']}"
                table[row["op"]][row["most"]] = tile_from(row)
        return cls(shared, {op: tuple(steps.items()) for op, steps in table.items()}, tensor_memory)

    def explain(self) -> str:
        sources = [tile.source for steps in self.table.values() for _, tile in steps]
        measured = sum(source != NOT_MEASURED for source in sources)
        if not measured:
            return "default tile sizes (not measured on this chip)"
        return f"{measured} of {len(sources)} tile sizes measured on this chip, the others defaults"

    def entry(self, op: str, most: int) -> AnyTile:
        """The tile of one step of the table, whatever the chip holds."""
        return dict(self.table[op])[most]

    def replaced(self, op: str, most: int, tile: AnyTile) -> "TileTable":
        """The same table with another tile at one step: how a search tries one."""
        steps = tuple((step, tile if step == most else held) for step, held in self.table[op])
        return replace(self, table={**self.table, op: steps})

    def expert_tiles(self, kind: str, rows_per_expert: int) -> ExpertTiles:
        """Tiles for `kind` ("16-bit", "fp8", "fp32") when an expert gets about this many rows."""
        op = f"experts {kind}"
        tiles, size = self._find(op, rows_per_expert, ExpertTiles), _ITEMSIZE[op]
        return ExpertTiles(
            tiles.gate_up.fitting(self.shared, 2 * tiles.gate_up.columns, size),
            tiles.down.fitting(self.shared, tiles.down.columns, size),
        )

    def four_bit_tiles(self, kind: str, rows_per_expert: int) -> ExpertTiles:
        """Weights are widened in registers. With tensor memory sums of both products pass through them too, and four
        warps of 64 rows, or eight of 128, spill in the loop."""
        tiles = self.expert_tiles(kind, rows_per_expert)
        return _FOUR_BITS if self.tensor_memory and tiles.rows > 32 else tiles

    def gqa(self, head_size: int, itemsize: int, eight: bool = False) -> tuple[AttentionTile, AttentionTile]:
        """(decode, chunk) tiles; `eight`: of a cache in 8 bits, for queries of `itemsize`."""
        if itemsize > 2 or self.shared < 96 << 10:
            return _PLAIN, _PLAIN
        decode, chunk = (self._find(op, head_size, AttentionTile) for op in ("gqa decode", "gqa chunk"))
        most = 1 if head_size > 128 else 2 if eight else chunk.stages
        if self.tensor_memory and chunk.stages > most and chunk.source == NOT_MEASURED:
            chunk = replace(chunk, stages=most)  # more spill in the loop there
        return decode, chunk

    def mla(self, heads: int, itemsize: int, eight: bool = False) -> AttentionTile:
        """`eight`: of a cache in 8 bits, for queries of `itemsize`."""
        if itemsize > 2 or self.shared < 96 << 10:
            return _PLAIN
        tile = self._find("mla", heads, AttentionTile)
        if eight and tile.queries > _OF_CODES.queries:
            return _OF_CODES
        # A latent tile and the queries of 64 heads lie side by side in shared memory, or do not fit. With tensor memory
        # the values of 64 heads are rescaled through registers, which spill; 16 at a time issue less.
        spills = self.tensor_memory and tile.source == NOT_MEASURED
        return tile if tile.queries < 64 or (self.shared >= 216 << 10 and not spills) else _FEW_HEADS

    def mla_prompt(self, itemsize: int) -> AttentionTile:
        """For latents that were multiplied up."""
        if itemsize > 2 or self.shared < 96 << 10:
            return _PLAIN
        tile = self._find("mla prompt", 0, AttentionTile)
        return tile if self.shared >= 216 << 10 else _FEW_QUERIES

    def router(self) -> RouterTile:
        return self._find("router", 0, RouterTile)

    def _find(self, op: str, size: int, kind: type[T]) -> T:
        for most, tile in self.table[op]:
            if size <= most:
                assert isinstance(tile, kind)
                return tile
        raise AssertionError(f"{op}: the last step takes everything")


def tile_from(row: Mapping[str, object]) -> AnyTile:
    """The tile of one measured row, its source saying chip, case, time, commit and date."""
    op, fields = str(row["op"]), row["tile"]
    assert isinstance(fields, dict)
    source = ", ".join(str(row[key]) for key in ("chip", "case", "us", "commit", "date"))
    if op.startswith("experts"):
        gate_up, down = (Tile(**fields[part], source=source) for part in ("gate_up", "down"))
        return ExpertTiles(gate_up, down)
    return (RouterTile if op == "router" else AttentionTile)(**fields, source=source)
