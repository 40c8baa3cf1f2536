"""`python -m bench.gpu_expected`: what a decode step and prompts' attention should take on a GPU. Expected, not measured.

A kernel takes as long as the slowest of three: its bytes over the chip's memory bandwidth, its products at the chip's
peak, and its instructions at four a clock of each multiprocessor. Instructions are those that the compiler made of its
loop (`gpu_budget.jsonl`), times the steps of the loop over all programs. Few bytes in flight, tails of waves and
launches are left out: nothing can be faster than this, and a kernel that takes much longer has a reason to be found.
Shapes and chips are those of `configs/`. It knows no measurements.
"""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from afserve.cli.plan.catalog import load_hardware, load_model
from afserve.config import AUTO, KV_DTYPES
from afserve.kernels.triton.config import AttentionTile, Tile
from afserve.kernels.triton.dense import FEW, tile_of_map
from afserve.kernels.triton.latent_prompts import LatentSizes
from afserve.kernels.triton.tiles import TileTable
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.shape import AttentionLayers, ModelShape
from bench.gpu_budget import budget
from bench.origin import ROOT
from bench.rows import table

PROCESSORS, PRODUCTS = (
    132,
    4096,
)  # of an H100 and H200 SXM: multiprocessors, bf16 FLOP of one in a clock (white paper)
HOST = ROOT / "bench" / "results" / "gpu_host.jsonl"
ISSUED = 4  # instructions of a multiprocessor in a clock
ARCH = 90
LATENT = LatentSizes(
    512, 128, 64, 128, TileTable().mla_prompt(2).queries
)  # a head of DeepSeek-V3 and Kimi K2
PIECES = (
    (128, 8192),
    (512, 4096),
    (2048, 2048),
    (2048, 32768),
)  # tokens of a prompt at once, and all up to there
PROMPT_HEAD = ["tokens", "context", "absorbed us", "multiplied up us", "runs"]
CACHE_HEAD = [
    "cache",
    "MB",
    "memory us",
    "products us",
    "instructions us",
    "expected us",
    "layer us",
    "step ms",
    "overlapped ms",
]
HEAD = ["kernel", "MB", "GFLOP", "memory us", "products us", "instructions us", "expected us"]


@dataclass(frozen=True, slots=True)
class Setting:
    """So many attention nodes of `rows` sequences each, all `context` long. `heads` and `case` of the attention kernel
    are the budget's; `latent` says which one it is. `maps` of attention, outputs and inputs, stay in FP8 blocks. `kv` is
    what caches are kept in, as `--kv-dtype` says it: by default the model's 16 bits. `narrow` is the case of 8."""

    model: str
    chip: str
    case: str
    narrow: str
    heads: int
    head: int
    latent: bool
    maps: tuple[tuple[int, int], ...]
    attention: int = 4
    experts: int = 4
    rows: int = 128
    context: int = 4096
    kv: str = AUTO

    @property
    def cached(self) -> str:
        """The attention kernel's case."""
        return self.case if self.kv == AUTO else self.narrow.format(self.kv)

    def row_bytes(self, group: AttentionLayers) -> float:
        """Of a token in a layer's cache: codes have two float32 scales for each head, or for a latent and its key."""
        return 2.0 * group.kv_elems if self.kv == AUTO else group.kv_elems + 8.0 * group.kv_heads


SETTINGS = (
    Setting(
        "deepseek-v3",
        "h200",
        "mla 64 heads decode",
        "mla 128 heads {} decode",
        128,
        576,
        True,
        ((2112, 7168), (24576, 1536), (7168, 16384)),
    ),
    Setting(
        "qwen3-235b-a22b",
        "h200",
        "gqa 64 heads of 128 decode",
        "gqa 64 heads of 128 {} decode",
        64,
        128,
        False,
        ((9216, 4096), (4096, 8192)),
    ),
)


@dataclass(frozen=True, slots=True)
class Work:
    """`instructions`: of all warps together."""

    name: str
    bytes: float
    flop: float = 0.0
    instructions: float = 0.0
    fp8: bool = False

    def seconds(self, chip: Hardware) -> tuple[float, float, float]:
        clock = chip.flops_bf16 / (PROCESSORS * PRODUCTS)
        peak = chip.flops_fp8 if self.fp8 else chip.flops_bf16
        issued = self.instructions / (PROCESSORS * ISSUED * clock)
        return self.bytes / chip.bandwidth, self.flop / peak, issued


def attention_side(
    setting: Setting, model: ModelShape, loops: Mapping[tuple[str, str], int]
) -> Iterator[Work]:
    """One layer of one attention node. The gate is in 16 bits, which hold every number of such a checkpoint."""
    (group,), rows, hidden = model.attention, setting.rows, model.hidden
    for outputs, inputs in setting.maps:
        yield linear_map(outputs, inputs, rows, loops)
    weights = group.weight_elems - sum(outputs * inputs for outputs, inputs in setting.maps)
    if weights:
        yield Work("products of each head (cuBLAS)", 2.0 * weights, 2.0 * weights * rows)
    tiles, tokens = TileTable(), rows * setting.context
    if setting.latent:
        tile, kernel = tiles.mla(setting.heads, 2, setting.kv != AUTO), "_attend_latent"
        programs = rows * -(-setting.heads // tile.queries)
    else:
        (tile, _), kernel = tiles.gqa(setting.head, 2, setting.kv != AUTO), "_decode"
        programs = rows * group.kv_elems // (2 * setting.head)
    yield Work(
        f"{kernel}, {setting.cached}", setting.row_bytes(group) * tokens, group.pair_flops * tokens,
        _instructions(tile, programs * -(-setting.context // tile.keys), loops[setting.cached, kernel]),
    )  # fmt: skip
    yield Work("router", 2.0 * hidden * model.experts.experts, 2.0 * hidden * model.experts.experts * rows)
    shared = model.experts.shared_elems
    if shared:
        inner = shared // (3 * hidden)
        yield linear_map(2 * inner, hidden, rows, loops)
        yield linear_map(hidden, inner, rows, loops)
    yield Work("norms, sums, rope, cache", 24.0 * hidden * rows)


def linear_map(outputs: int, inputs: int, rows: int, loops: Mapping[tuple[str, str], int]) -> Work:
    """In FP8 blocks, with its rows' rounding."""
    tile = tile_of_map(TileTable(), PROCESSORS, rows, outputs)
    shape = {128: "24576 x 1536", 64: "7168 x 16384", 32: "2112 x 7168"}[tile.columns]
    loop = loops[f"linear fp8 {shape} rows {100 if rows > FEW else 8}", "_multiply_blocks"]
    steps = -(-rows // tile.rows) * -(-outputs // tile.columns) * -(-inputs // tile.depth)
    moved, flop = outputs * inputs + rows * (4.0 * inputs + 2.0 * outputs), 2.0 * outputs * inputs * rows
    name = f"linear map {outputs} x {inputs} in FP8"
    return Work(name, moved, flop, _instructions(tile, steps, loop), fp8=rows > FEW)


def expert_side(setting: Setting, model: ModelShape, loops: Mapping[tuple[str, str], int]) -> Iterator[Work]:
    """One layer of one expert node, FP8 weights: the rows of all attention nodes, evenly on all experts."""
    experts, hidden = model.experts, model.hidden
    inner, held = experts.elems // (3 * hidden), experts.experts // setting.experts
    each = setting.attention * setting.rows * experts.top_k / experts.experts
    tiles = TileTable().expert_tiles("fp8", int(each))
    case = f"experts fp8 rows {8 if each <= 16 else 32 if each <= 32 else 100}"
    for kernel, tile, outputs, columns, depth in (
        ("_gate_up", tiles.gate_up, 2 * inner, inner, hidden), ("_down", tiles.down, hidden, hidden, inner),
    ):  # fmt: skip
        programs = held * -(-int(each) // tile.rows) * -(-columns // tile.columns)
        steps = programs * -(-depth // tile.depth)
        moved = held * (outputs * depth + each * (depth + 2 * outputs))
        yield Work(
            f"{kernel}, {case}", moved, 2.0 * held * each * outputs * depth,
            _instructions(tile, steps, loops[case, kernel]), fp8=each > 32,
        )  # fmt: skip


def prompt_ways(
    setting: Setting, rows: int, context: int, loops: Mapping[tuple[str, str], int]
) -> tuple[Work, Work]:
    """One layer's attention of a prompt's last `rows` tokens, absorbed and multiplied up, the up-projections of each
    among it. Products are those that choose; the loops of whole tiles are instructions."""
    tiles, heads, seen = TileTable(), setting.heads, context - rows / 2
    row, up = LATENT.rank + LATENT.rope, LATENT.nope + LATENT.value
    absorbed, expanded = tiles.mla(heads, 2), tiles.mla_prompt(2)
    steps = rows * -(-heads // absorbed.queries) * seen / absorbed.keys
    loop = loops["mla 64 heads prompt", "_attend_latent"]
    moved = 2.0 * (context * row + rows * heads * (row + LATENT.rank))
    one = Work("absorbed", moved, 2.0 * heads * LATENT.absorbed(rows, context), loop * steps * absorbed.warps)
    steps = -(-rows // expanded.queries) * heads * seen / expanded.keys
    loop = loops["mla prompt, multiplied up", "_attend_prompts"]
    moved = 2.0 * (context * (3 * row + 2 * heads * up) + rows * heads * (LATENT.rope + up))
    products = 2.0 * heads * LATENT.multiplied_up(rows, context)
    return one, Work("multiplied up", moved, products, loop * steps * expanded.warps)


def prompts(setting: Setting) -> str:
    """Of a model with latents, what a layer's attention takes for pieces of a prompt in both forms."""
    if not setting.latent:
        return ""
    chip, loops, lines = load_hardware(setting.chip), _loops(), list[list[str]]()
    for rows, context in PIECES:
        ways = prompt_ways(setting, rows, context, loops)
        times = [f"{1e6 * max(way.seconds(chip)):,.0f}" for way in ways]
        lines.append([f"{rows:,}", f"{context:,}", *times, ways[LATENT.go_up(rows, context)].name])
    return (
        "\n\nAttention of a piece of one prompt, one layer: with latents as they are, or multiplied up to keys and values of each head. "
        "What multiplies less runs (`kernels/triton/latent_prompts.py`).\n\n" + table(PROMPT_HEAD, lines)
    )


def caches(setting: Setting) -> str:
    """What a cache in 8 bits makes of the attention kernel and of a step, beside the model's 16."""
    model, chip, loops = load_model(setting.model), load_hardware(setting.chip), _loops()
    between, lines = exchange_seconds(setting, model, chip), list[list[str]]()
    for kv in KV_DTYPES:
        one = replace(setting, kv=kv)
        works = list(attention_side(one, model, loops))
        (kernel,) = (work for work in works if one.cached in work.name)
        attends = sum(max(work.seconds(chip)) for work in works)
        computes = sum(max(work.seconds(chip)) for work in expert_side(one, model, loops))
        parts = kernel.seconds(chip)
        times = [f"{1e6 * part:,.1f}" for part in (*parts, max(parts), attends)]
        whole = attends + computes + between, max(attends, computes)
        steps = [f"{1e3 * model.layers * seconds:,.1f}" for seconds in whole]
        lines.append(["16 bits (auto)" if kv == AUTO else kv, f"{kernel.bytes / 1e6:,.1f}", *times, *steps])
    return (
        "\n\nBy what caches are kept in (`--kv-dtype`): the attention kernel, an attention node's layer, and all layers one after the other or overlapped.\n\n"
        + table(CACHE_HEAD, lines)
    )


def exchange_seconds(setting: Setting, model: ModelShape, chip: Hardware) -> float:
    """There and back over the fast link: each row in bf16 to every node that has one of its experts, float32 sums
    back."""
    absent: float = (1.0 - 1.0 / setting.experts) ** model.experts.top_k
    messages = setting.rows * setting.experts * (1.0 - absent) * model.hidden
    return 6.0 * messages / chip.link + 2 * chip.link_latency


def expected(setting: Setting) -> str:
    model, chip = load_model(setting.model), load_hardware(setting.chip)
    loops = _loops()
    lines, sums = list[list[str]](), list[float]()
    for side, works in (("attention", attention_side), ("expert", expert_side)):
        sums.append(0.0)
        for work in works(setting, model, loops):
            parts = work.seconds(chip)
            sums[-1] += max(parts)
            figures = (work.bytes / 1e6, work.flop / 1e9, *(1e6 * part for part in (*parts, max(parts))))
            lines.append([f"{side}: {work.name}", *(f"{figure:,.1f}" for figure in figures)])
    between = exchange_seconds(setting, model, chip)
    attends, computes = sums
    layer = attends + computes + between
    return (
        f"**{setting.model} on {setting.chip}**, {setting.attention} attention and {setting.experts} expert nodes, {setting.rows} "
        f"sequences of {setting.context:,} tokens on each attention node, an FP8 checkpoint, {'bf16' if setting.kv == AUTO else setting.kv} cache; one layer.\n\n"
        + table(HEAD, lines)
        + f"\n\nA layer takes an attention node {1e6 * attends:,.0f} us and an expert node {1e6 * computes:,.0f} us, and rows and sums are "
        f"{1e6 * between:,.0f} us on their way. {model.layers} layers: at least {1e3 * model.layers * layer:,.1f} ms one after the other, "
        f"{1e3 * model.layers * max(attends, computes):,.1f} ms where micro-batches hide all but the slower side."
        + caches(setting)
        + prompts(setting)
    )


def section() -> str:
    """Of bench/RESULTS.md."""
    return "\n\n".join(
        [
            "**Expected, not measured**: no kernel has run on a GPU. `python -m bench.gpu_expected` reckons from the compile budget (`bench/gpu_budget.jsonl`) and the chip's "
            "figures (`configs/hardware`); bytes in flight, tails of waves and launches are left out. `python -m bench.kernels_cuda` times the kernels by the same names: what takes "
            "longer than twice the last column contradicts it.",
            *map(expected, SETTINGS),
            host_times(),
        ]
    )


def host_times() -> str:
    """Of the newest row of `bench.gpu_host`."""
    row = json.loads(HOST.read_text(encoding="utf-8").splitlines()[-1])
    told = [
        f"{name} {side['ratio']:.2f} ({side['spread'][0]:.2f} to {side['spread'][1]:.2f}) of it"
        for name, side in (("the attention node", row["attention"]), ("an expert node", row["expert"]))
    ]
    return (
        f"**Host time of a MoE layer, launch by launch**, without a GPU (`python -m bench.gpu_host`: launches end before the driver), beside "
        f"{row['beside']}, {row['turns']} turns of ten steps, one attention and {row['experts']} expert nodes: {', '.join(told)} ({row['machine']})."
    )


def _loops() -> dict[tuple[str, str], int]:
    """Instructions of each kernel's loop, by case and kernel."""
    rows = budget().items()
    return {(case, kernel): int(str(row["loop"])) for (_, arch, case, kernel), row in rows if arch == ARCH}


def _instructions(tile: Tile | AttentionTile, steps: int, loop: int) -> float:
    return float(loop) * steps * tile.warps


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m bench.gpu_expected", description=__doc__.splitlines()[0]
    ).parse_args()
    print(section())


if __name__ == "__main__":
    main()
