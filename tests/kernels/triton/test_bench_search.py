"""Rows and `--search` without a device: what happens when a case fails, the device is lost or time runs out."""

import json
from itertools import count

import pytest
import torch

from afserve.kernels.devices.cuda import Chip
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.config import AttentionTile
from afserve.kernels.triton.tiles import ALL, DEFAULTS, TileTable
from bench.cuda_cases import Experts, Planned, gqa_case, mla_case, small_case
from bench.cuda_clock import Case, Limits
from bench.cuda_search import (
    Found,
    Place,
    _with_tile,
    climb,
    fields_of,
    places,
    row_of,
    save,
    search,
    tile_of,
)
from bench.kernels_cuda import LOST, main

KNOWN = {"machine": "NVIDIA H200", "commit": "abc", "date": "2026-01-02", "triton": "3.6.0"}


def broken():
    raise RuntimeError("too much shared memory")


class Counting:
    """A clock for devices that are not there: it runs the call and says one second more every time."""

    place = "nowhere"

    def __init__(self, device=None, repeats=10):
        self._ticks = count(1)

    def seconds(self, run):
        run()
        return [float(next(self._ticks))] * 10


@pytest.fixture
def pretended(device, monkeypatch):
    """The bench's own way through, with a device that is not there and two tiny cases a group."""
    ops = TritonBackend(device, 2)
    monkeypatch.setattr("bench.kernels_cuda.count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("bench.cuda_rows.chip_of", lambda device: Chip("NVIDIA H200", (9, 0), 132))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(TritonBackend, "open", lambda device: ops)
    monkeypatch.setattr("bench.cuda_clock.Clock", Counting)
    monkeypatch.setattr("bench.cuda_search.Clock", Counting)
    monkeypatch.setattr("bench.cuda_clock.measure_limits", lambda device, clock: Limits(1e9, 1e9, 1e9))
    tiny = [
        Planned("mla", lambda: mla_case(ops, 1, 20, 3, 16, 8, 8)),
        Planned("broken", broken),
        Planned("route", lambda: small_case(ops, "route", 2, 64, 32)),
    ]
    monkeypatch.setattr("bench.cuda_cases.groups", lambda ops: {"mla": tiny, "small": tiny[2:]})
    return ops


def test_rows_of_groups(pretended, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["--only", "mla", "--only", "small", "--out", str(out), "--failures"]) == 0
    rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(row["group"], row["case"]) for row in rows[1:]] == [
        ("mla", "broken"),
        ("mla", "T2"),
        ("small", "T2"),
    ]
    assert rows[0]["op"] == "mla decode" and rows[1]["error"] and rows[2]["us_median"] > 0
    assert all(
        row["machine"] == "NVIDIA H200" and row["clock"] == "nowhere" and row["copy_GB_s"] == 1
        for row in rows
    )
    assert "of bound" in capsys.readouterr().out


def test_what_failed_is_no_result(pretended, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["--only", "mla", "--out", str(out)]) == 0
    assert not any("error" in json.loads(text) for text in out.read_text().splitlines())
    assert "too much shared memory" in capsys.readouterr().out


def test_a_device_that_is_lost_ends_the_process(pretended, tmp_path, monkeypatch):
    def gone(device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    out = tmp_path / "rows.jsonl"
    assert main(["--only", "mla", "--out", str(out), "--failures"]) == LOST
    assert [json.loads(text)["case"] for text in out.read_text().splitlines()] == [
        "A3 batch1 context20",
        "broken",
    ]


def test_a_search_of_a_device(pretended, tmp_path, monkeypatch, capsys):
    case = _with_tile(pretended, "mla", ALL, mla_case, 1, 20, 40, 16, 8, 8)
    places_there = [Place("mla", ALL, {"keys": (16,)}, case), Place("router", ALL, {}, case)]
    monkeypatch.setattr("bench.cuda_search.places", lambda ops, experts: places_there)
    tiles = tmp_path / "tiles.json"
    assert main(["--search", "--only", "mla", "--tiles", str(tiles)]) == 0
    (row,) = json.loads(tiles.read_text())
    assert (
        row["op"] == "mla" and row["tried"] == 2 and row["chip"] == "NVIDIA H200" and row["default_us"] == 1e6
    )
    assert "1 places" in capsys.readouterr().out


def test_climbing_stops_at_the_top_and_at_the_time():
    space = {"a": (1, 2, 3, 4), "b": (1, 2)}
    tried = []

    def seconds(fields):
        tried.append(dict(fields))
        return None if fields["a"] == 4 else 10.0 - fields["a"] - fields["b"]

    found = climb({"a": 1, "b": 1}, space, seconds, lambda: False)
    assert found.fields == {"a": 3, "b": 2} and found.first == 8.0 and found.seconds == 5.0
    assert found.tried == len(tried) == len({tuple(t.values()) for t in tried})
    assert climb({"a": 4, "b": 1}, space, seconds, lambda: False) is None
    assert climb({"a": 1, "b": 1}, space, seconds, lambda: True).fields == {"a": 1, "b": 1}


def test_noise_is_no_reason_to_move():
    found = climb({"a": 1}, {"a": (1, 2)}, lambda fields: 1.0 - 0.001 * fields["a"], lambda: False)
    assert found.fields == {"a": 1}


@pytest.mark.parametrize("op", DEFAULTS)
def test_fields_make_the_tile_they_came_from(op):
    for _, tile in DEFAULTS[op]:
        assert tile_of(op, fields_of(tile)) == tile


def test_every_step_of_the_tables_is_searched(device):
    ops = TritonBackend(device, 2)
    found = {(p.op, p.most): p for p in places(ops, Experts(device))}
    assert set(found) == {(op, most) for op in DEFAULTS if op != "experts fp32" for most, _ in DEFAULTS[op]}
    for (op, most), place in found.items():
        start = fields_of(ops.tiles.entry(op, most))
        assert set(place.space) <= set(start)
    assert not any(
        p.op == "experts fp8" for p in places(TritonBackend(device, 2, has_fp8=False), Experts(device))
    )


def test_a_search_over_tiny_cases(device, tmp_path):
    """The real cases at tiny sizes; the clock counts, so that the first tile of each place wins."""
    ops, ticks, out = TritonBackend(device, 2), count(1), tmp_path / "tiles.json"
    small, experts = {"keys": (16, 32)}, Experts(device, 32, 16)
    wanted = [
        Place("mla", ALL, small, _with_tile(ops, "mla", ALL, mla_case, 1, 20, 40, 16, 8, 8)),
        Place("gqa decode", 128, small, _with_tile(ops, "gqa decode", 128, gqa_case, 1, 1, 20, 4, 2, 16, 8)),
        Place("router", ALL, {"parts": (2,)}, _with_tile(ops, "router", ALL, small_case, "route", 2, 64, 32)),
        Place("experts 16-bit", 16, {"gate_up.warps": (4, 8)}, lambda tile: experts.case(False, 2, 1, tile)),
        Place("gqa chunk", 128, {}, lambda tile: Case("broken", "", broken, 1)),
    ]  # fmt: skip

    def timed(case):
        case.run()
        return float(next(ticks))

    def keep(place, found):
        save(out, row_of(place, found, KNOWN))

    search(wanted, ops.tiles, timed, 1.0, keep, now=lambda: 0.0)
    rows = json.loads(out.read_text())
    assert [(row["op"], row["most"]) for row in rows] == [
        ("experts 16-bit", 16), ("gqa decode", 128), ("mla", ALL), ("router", ALL),
    ]  # fmt: skip
    table = TileTable.of_chip("NVIDIA H200", 227 << 10, out)
    assert fields_of(table.entry("mla", ALL)) == fields_of(DEFAULTS["mla"][-1][1])
    assert "NVIDIA H200" in table.entry("experts 16-bit", 16).source
    assert table.explain().startswith("4 of 17")


def test_a_new_row_takes_the_place_of_its_chips_old_one(tmp_path):
    out = tmp_path / "tiles.json"
    place = Place("mla", ALL, {}, lambda tile: Case("mla decode", "A128", lambda: None, 1))
    start = fields_of(AttentionTile(16, 32, 128, 4, 2))
    for chip, us in (("A", 1e-6), ("B", 2e-6), ("A", 3e-6)):
        save(out, row_of(place, Found(start, us, us, 1), KNOWN | {"machine": chip}))
    assert [(row["chip"], row["us"]) for row in json.loads(out.read_text())] == [("A", 3.0), ("B", 2.0)]


def test_a_tile_that_is_tried_is_the_one_that_runs(device, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "afserve.kernels.triton.latents.attend_mla",
        lambda q, q_rope, cache, batch, scale, tile, parts: seen.append(tile) or torch.empty(0),
    )
    tile = AttentionTile(16, 16, 16, 4, 1)
    _with_tile(TritonBackend(device, 2), "mla", 32, mla_case, 1, 20, 3, 16, 8, 8)(tile).run()
    assert seen == [tile]
