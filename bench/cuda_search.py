"""The search that fills `kernels/triton/tiles.json`: from the tile a table holds, one field changed at a time.

A step is taken when it is faster by more than noise, until none is or the time is up; each (operation, size) of the
tables has its share of the time. What does not compile or does not fit is passed over. It never runs while serving.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from afserve.kernels.devices.cuda import numbered
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.config import AttentionTile, ExpertTiles, RouterTile, Tile
from afserve.kernels.triton.tiles import ALL, AnyTile, TileTable
from bench.cuda_cases import Experts, gqa_case, mla_case, mla_prompt_case, small_case
from bench.cuda_clock import Case, Clock
from bench.cuda_rows import FAILURES, stamp

Fields = Mapping[str, int]
Space = Mapping[str, Sequence[int]]
BETTER = 0.99  # of the best time so far: less of a gain is noise
WARPS, STAGES = (4, 8), (2, 3, 4, 5)
ATTENTION: dict[str, Sequence[int]] = {"keys": (32, 64, 128), "warps": WARPS, "stages": STAGES}


@dataclass(frozen=True)
class Place:
    """One entry of the tables, the case it is timed on, and what may be tried there."""

    op: str
    most: int
    space: Space
    case: Callable[[AnyTile], Case]


@dataclass(frozen=True)
class Found:
    fields: Fields
    seconds: float
    first: float
    tried: int


def climb(
    start: Fields, space: Space, seconds: Callable[[Fields], float | None], out_of_time: Callable[[], bool]
) -> Found | None:
    """The best of the neighbours' neighbours; None where the start itself cannot run."""
    known: dict[tuple[int, ...], float | None] = {}

    def timed(fields: Fields) -> float | None:
        key = tuple(fields.values())
        if key not in known:
            known[key] = seconds(fields)
        return known[key]

    best, least = dict(start), timed(start)
    if least is None:
        return None
    first, moved = least, True
    while moved and not out_of_time():
        moved = False
        for name, values in space.items():
            for value in values:
                if out_of_time():
                    break
                candidate = best | {name: value}
                taken = timed(candidate)
                if taken is not None and taken < BETTER * least:
                    best, least, moved = candidate, taken, True
    return Found(best, least, first, len(known))


def fields_of(tile: AnyTile) -> dict[str, int]:
    """The integers of a tile by name; of expert tiles as gate_up.columns and so on, their rows once."""
    if isinstance(tile, ExpertTiles):
        parts = {"gate_up": asdict(tile.gate_up), "down": asdict(tile.down)}
        flat = {
            f"{p}.{k}": v
            for p, fields in parts.items()
            for k, v in fields.items()
            if k not in ("rows", "source")
        }
        return {"rows": tile.rows, **flat}
    return {k: v for k, v in asdict(tile).items() if k != "source"}


def tile_of(op: str, fields: Fields) -> AnyTile:
    given: dict[str, Any] = dict(fields)
    if not op.startswith("experts"):
        return (RouterTile if op == "router" else AttentionTile)(**given)
    gate_up, down = (
        Tile(given["rows"], **{k.partition(".")[2]: v for k, v in given.items() if k.startswith(part + ".")})
        for part in ("gate_up", "down")
    )
    return ExpertTiles(gate_up, down)


def row_of(place: Place, found: Found, known: Mapping[str, object]) -> dict[str, object]:
    """A row of `tiles.json`."""
    fields: dict[str, object] = dict(found.fields)
    if place.op.startswith("experts"):
        parts = ("gate_up", "down")
        fields = {
            part: {"rows": found.fields["rows"]}
            | {k.partition(".")[2]: v for k, v in found.fields.items() if k.startswith(part + ".")}
            for part in parts
        }
    case = place.case(tile_of(place.op, found.fields))
    return {
        "op": place.op, "most": place.most, "tile": fields, "chip": known["machine"], "case": f"{case.op} {case.case}",
        "us": round(1e6 * found.seconds, 2), "default_us": round(1e6 * found.first, 2), "tried": found.tried,
        "commit": known["commit"], "date": known["date"], "triton": known["triton"],
    }  # fmt: skip


def places(ops: TritonBackend, experts: Experts) -> list[Place]:
    """Decode first: what is not reached keeps its default."""
    with_tile = partial(_with_tile, ops)
    found = [
        Place(
            "mla",
            most,
            ATTENTION | {"split": (64, 128, 256, 512), "queries": (16, 32, 64) if heads > 32 else (16,)},
            with_tile("mla", most, mla_case, 64, 4096, heads),
        )
        for most, heads in ((ALL, 128), (32, 16))
    ]
    found += [
        Place("gqa decode", most, ATTENTION | {"split": (128, 256, 512)},
              with_tile("gqa decode", most, gqa_case, 32, 1, 4096, 64, 4, size))
        for most, size in ((128, 128), (ALL, 256))
    ]  # fmt: skip
    space = {"parts": (2, 4, 8, 16), "columns": (16, 32, 64), "depth": (64, 128, 256), "warps": (2, 4, 8)}
    found.append(Place("router", ALL, space, with_tile("router", ALL, small_case, "route", 64)))
    found += [_expert_place(experts, fp8, most) for most in (16, 128, 32, ALL) for fp8 in (False, True)]
    chunk = ATTENTION | {"queries": (64, 128)}
    found += [
        Place("gqa chunk", most, chunk, with_tile("gqa chunk", most, gqa_case, 1, 4096, 4096, 64, 4, size))
        for most, size in ((128, 128), (ALL, 256))
    ]
    found.append(Place("mla prompt", ALL, chunk, with_tile("mla prompt", ALL, mla_prompt_case, 4096, 128)))
    return [place for place in found if ops.holds_fp8(torch.bfloat16) or place.op != "experts fp8"]


def _with_tile(
    ops: TritonBackend, op: str, most: int, make: Callable[..., Case], *arguments: object
) -> Callable[[AnyTile], Case]:
    def case(tile: AnyTile) -> Case:
        return make(ops.with_tiles(ops.tiles.replaced(op, most, tile)), *arguments)

    return case


def _expert_place(experts: Experts, fp8: bool, most: int) -> Place:
    rows = {16: 4, 32: 32, 128: 128, ALL: 4096}[most]
    heights = {16: (16,), 32: (16, 32, 64), 128: (64, 128), ALL: (64, 128)}[most]
    space: dict[str, Sequence[int]] = {"rows": heights}
    for part in ("gate_up", "down"):
        space[f"{part}.warps"], space[f"{part}.stages"] = WARPS, STAGES
        if not fp8:  # FP8 steps and columns are its scale blocks
            space[f"{part}.columns"], space[f"{part}.depth"] = (32, 64, 128, 256), (64, 128)
        space[f"{part}.band"] = (1, 4, 8, 16) if rows > 32 else (1,)

    def case(tile: AnyTile) -> Case:
        assert isinstance(tile, ExpertTiles)
        return experts.case(fp8, 8 if rows > 128 else 32, rows, tile)

    return Place("experts fp8" if fp8 else "experts 16-bit", most, space, case)


def search(
    wanted: Sequence[Place], table: TileTable, timed: Callable[[Case], float], minutes: float,
    keep: Callable[[Place, Found], None], now: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Every place in turn, each with an equal share of the time that is left."""
    end = now() + 60 * minutes
    for left, place in zip(range(len(wanted), 0, -1), wanted, strict=True):
        deadline = now() + (end - now()) / left

        def seconds(fields: Fields, place: Place = place) -> float | None:
            try:
                return timed(place.case(tile_of(place.op, fields)))
            except FAILURES:
                return None

        def late(deadline: float = deadline) -> bool:
            return now() >= deadline

        found = climb(fields_of(table.entry(place.op, place.most)), place.space, seconds, late)
        if found is None:
            print(f"{place.op} {place.most}: the default does not run here", flush=True)
        else:
            keep(place, found)


def search_device(out: Path, minutes: float, only: Sequence[str] | None) -> int:
    device = numbered(torch.device("cuda"))
    ops, clock, known = TritonBackend.open(device), Clock(device, 10), stamp(device)
    wanted = places(ops, Experts(ops.device))
    if only:
        wanted = [p for p in wanted if p.op.split()[0] in only]

    def keep(place: Place, found: Found) -> None:
        row = row_of(place, found, known)
        print(json.dumps(row), flush=True)
        save(out, row)

    print(f"{len(wanted)} places, Triton {triton.__version__}, {known['machine']}", flush=True)
    search(wanted, ops.tiles, lambda case: statistics.median(clock.seconds(case.run)), minutes, keep)
    return 0


def save(out: Path, row: Mapping[str, object]) -> None:
    """In place of the row of the same chip, operation and size, if there is one."""
    rows = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else []
    same = ("chip", "op", "most")
    rows = [old for old in rows if any(old[key] != row[key] for key in same)]
    rows = sorted([*rows, dict(row)], key=lambda r: tuple(str(r[key]) for key in same))
    out.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n", encoding="utf-8")
