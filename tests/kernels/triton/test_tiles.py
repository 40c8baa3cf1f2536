"""The tile tables: every default fits every chip, and a measured row counts on its own chip alone."""

import json
from dataclasses import replace

import pytest

from afserve.kernels.triton.config import NOT_MEASURED, AttentionTile, RouterTile
from afserve.kernels.triton.tiles import ALL, DEFAULTS, MEASURED, TileTable

ROW = {"chip": "NVIDIA H200", "case": "A case", "us": 12.5, "commit": "abc", "date": "2026-01-02"}
TILE = {"rows": 16, "columns": 32, "depth": 128, "warps": 8, "stages": 2, "band": 1}


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("kind", ["16-bit", "fp8", "fp32"])
def test_tiles_fit_the_chip(shared, kind):
    size, table = {"16-bit": 2, "fp8": 1, "fp32": 4}[kind], TileTable(shared)
    for rows in (1, 16, 17, 100, 5000):
        tiles = table.expert_tiles(kind, rows)
        for tile, columns in ((tiles.gate_up, 2 * tiles.gate_up.columns), (tiles.down, tiles.down.columns)):
            assert tile.stages * (tile.rows + columns) * tile.depth * size <= shared


def test_attention_by_what_fits():
    assert TileTable(99 << 10).mla(128, 2).queries == 16 and TileTable().mla(128, 2).queries == 64
    assert TileTable().mla(16, 2).queries == 16 and TileTable().mla(128, 4).queries == 16
    assert (
        TileTable().mla(128, 2, eight=True).queries == 32 and TileTable().mla(16, 2, eight=True).queries == 16
    )
    assert TileTable(48 << 10).gqa(128, 2)[1].queries == 16
    assert TileTable().gqa(128, 2) != TileTable().gqa(256, 2)


def test_a_chip_with_tensor_memory_takes_fewer_heads_until_it_has_measured():
    table = TileTable(tensor_memory=True)
    assert table.mla(128, 2) == table.mla(16, 2) and table.mla(128, 2) != TileTable().mla(128, 2)
    assert table.gqa(256, 2)[1].stages == 1 and table.gqa(128, 2) == TileTable().gqa(128, 2)
    assert [one.gqa(128, 2, eight=True)[1].stages for one in (table, TileTable())] == [2, 3]
    measured = replace(TileTable().mla(128, 2), source="B200, A case")
    assert table.replaced("mla", ALL, measured).mla(128, 2) == measured


def test_a_chip_with_tensor_memory_takes_no_more_rows_of_four_bits_than_fit_its_registers():
    table = TileTable(tensor_memory=True)
    assert [table.four_bit_tiles("16-bit", rows).rows for rows in (8, 32, 100, 600)] == [16, 32, 64, 64]
    assert {table.four_bit_tiles("16-bit", rows).gate_up.warps for rows in (100, 600)} == {8}
    assert all(
        TileTable().four_bit_tiles("16-bit", n) == TileTable().expert_tiles("16-bit", n) for n in (8, 600)
    )


def test_a_default_says_that_it_is_one():
    assert all(tile.source == NOT_MEASURED for steps in DEFAULTS.values() for _, tile in steps)
    assert "not measured" in TileTable().explain()


def test_a_measured_row_counts_on_its_chip(tmp_path):
    rows = [
        ROW | {"op": "experts fp8", "most": 32, "tile": {"gate_up": TILE, "down": TILE | {"stages": 3}}},
        ROW | {"op": "router", "most": 1 << 30, "tile": {"rows": 32, "columns": 16, "depth": 64, "parts": 8}},
        ROW
        | {
            "op": "mla",
            "most": 32,
            "tile": {"queries": 16, "keys": 64, "split": 64, "warps": 4, "stages": 3},
        },
    ]
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps(rows))
    here, other = (TileTable.of_chip(chip, 227 << 10, file) for chip in ("NVIDIA H200", "NVIDIA L40S"))
    source = "NVIDIA H200, A case, 12.5, abc, 2026-01-02"
    assert here.expert_tiles("fp8", 20).down.stages == 3 and here.expert_tiles("fp8", 20).source == source
    assert here.expert_tiles("fp8", 10).source == NOT_MEASURED
    assert here.router() == RouterTile(32, 16, 64, 8, source=source)
    assert here.mla(8, 2) == AttentionTile(16, 64, 64, 4, 3, source)
    assert here.explain().startswith("3 of 17 tile sizes measured")
    assert other == TileTable.of_chip("x", 227 << 10, tmp_path / "absent.json")
    assert other.explain() == TileTable().explain()


def test_what_is_in_the_tree_can_be_read():
    """Every row of the file, if there is one, has a place in the table."""
    rows = json.loads(MEASURED.read_text()) if MEASURED.is_file() else []
    for chip in {row["chip"] for row in rows}:
        assert "measured on this chip" in TileTable.of_chip(chip, 227 << 10).explain()
