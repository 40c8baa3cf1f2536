"""Grouped expert products, the row plan and the weighted sum, against float64 loops over the rows."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.kernels.triton.config import ExpertTiles, Tile
from afserve.kernels.triton.experts import ExpertWeights, expert_ffn
from afserve.kernels.triton.permute import combine_rows, most_tiles, plan_rows
from afserve.kernels.triton.quant import quantise_blocks

SMALL = ExpertTiles(Tile(16, 16, 16, 4, 1, 2), Tile(16, 32, 32, 4, 1, 2))
SMALL_FP8 = ExpertTiles(Tile(16, 32, 32, 4, 1, 2), Tile(16, 32, 32, 4, 1, 2))
ROUTINGS = ["mixed", "one expert", "skipped", "one row"]


def routing(kind: str, slots: int, choices: int, seed: int = 0) -> torch.Tensor:
    """slot_RK of awkward kinds: slots with nothing, one slot with everything, rows with nothing."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "one row" else 21
    slot_RK = torch.rand((rows, slots), generator=generator).topk(choices).indices.int()
    if kind == "mixed":
        slot_RK[slot_RK == 1] = -1  # slot 1 gets nothing
    if kind == "one expert":
        slot_RK[:] = -1
        slot_RK[:, 0] = slots - 1
    if kind == "skipped":
        slot_RK[:] = -1
    return slot_RK


def ffn_truth(x_RH, slot_RK, weight_RK, gate_up, down):
    truth = torch.zeros(x_RH.shape, dtype=torch.float64)
    for r, slots in enumerate(slot_RK.tolist()):
        for k, slot in enumerate(slots):
            if slot >= 0:
                gate, up = (gate_up[slot].double() @ x_RH[r].double()).chunk(2)
                truth[r] += weight_RK[r, k].double() * (down[slot].double() @ (gate * gate.sigmoid() * up))
    return truth


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("dtype", "hidden", "inner"),
    [(torch.bfloat16, 64, 32), (torch.bfloat16, 40, 24), (torch.float16, 40, 24), (torch.float32, 40, 24)],
)
def test_expert_ffn(device, close, kind, dtype, hidden, inner):
    torch.manual_seed(1)
    slot_RK = routing(kind, slots=5, choices=3)
    rows = slot_RK.shape[0]
    x_RH = torch.randn(rows, hidden).to(dtype)
    gate_up = (torch.randn(5, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(5, hidden, inner) / inner**0.5).to(dtype)
    weight_RK = torch.rand(rows, 3)
    out_RH = torch.full((rows, hidden), float("nan"), dtype=dtype, device=device)
    on_device = [t.to(device) for t in (x_RH, slot_RK, weight_RK)]
    expert_ffn(*on_device, ExpertWeights(gate_up.to(device), down.to(device)), SMALL, out_RH)
    close(out_RH, ffn_truth(x_RH, slot_RK, weight_RK, gate_up, down))


def dequantised(q, scale, group):
    wide = scale.double().repeat_interleave(group, -2).repeat_interleave(group, -1)
    return q.double() * wide[..., : q.shape[-2], : q.shape[-1]]


def quantised_experts(weight_EOI, group):
    pairs = [quantise_blocks(weight, group) for weight in weight_EOI]
    return torch.stack([q for q, _ in pairs]), torch.stack([scale for _, scale in pairs])


def rounded(x, group):
    """What one row of float64 becomes through e4m3 with a scale per group."""
    parts = []
    for part in x.split(group):
        scale = part.abs().max().clamp(min=1e-10) / 448
        parts.append((part / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts)


def fp8_truth(x_RH, slot_RK, weight_RK, gate_up, down, group):
    truth = torch.zeros(x_RH.shape, dtype=torch.float64)
    for r, slots in enumerate(slot_RK.tolist()):
        for k, slot in enumerate(slots):
            if slot >= 0:
                gate, up = (gate_up[slot] @ rounded(x_RH[r].double(), group)).chunk(2)
                truth[r] += weight_RK[r, k].double() * (
                    down[slot] @ rounded(gate * gate.sigmoid() * up, group)
                )
    return truth


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (80, 48)])
def test_expert_ffn_fp8(device, fp8, close, kind, hidden, inner):
    torch.manual_seed(2)
    group = 32
    slot_RK = routing(kind, slots=4, choices=2)
    rows = slot_RK.shape[0]
    x_RH = torch.randn(rows, hidden).bfloat16()
    halves = [
        quantised_experts((torch.randn(4, inner, hidden) / hidden**0.5).to(device), group) for _ in "gu"
    ]
    down, down_scale = quantised_experts((torch.randn(4, hidden, inner) / inner**0.5).to(device), group)
    gate_up, gate_up_scale = (torch.cat(parts, dim=1) for parts in zip(*halves, strict=True))
    weights = ExpertWeights(gate_up, down, gate_up_scale, down_scale, group)
    weight_RK = torch.rand(rows, 2)
    out_RH = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    expert_ffn(x_RH.to(device), slot_RK.to(device), weight_RK.to(device), weights, SMALL_FP8, out_RH)
    exact = torch.cat([dequantised(q, scale, group) for q, scale in halves], dim=1).cpu()
    exact_down = dequantised(down, down_scale, group).cpu()
    truth = fp8_truth(x_RH, slot_RK, weight_RK, exact, exact_down, group)
    close(out_RH, truth, steps=5.0)  # a value next to a rounding edge may fall to either side of it


def check_plan(slot_RK, slots, tile):
    """Each slot's pairs in order, padded to whole tiles, slots one after the other, unused tiles last."""
    plan = plan_rows(slot_RK, slots, tile)
    flat = slot_RK.flatten().tolist()
    expected, tiles = [], []
    for slot in range(slots):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == slot]
        width = -(-len(pairs) // tile)
        expected += pairs + [-1] * (width * tile - len(pairs))
        tiles += [slot] * width
    assert plan.pair_P.tolist() == expected + [-1] * (plan.tiles * tile - len(expected))
    assert plan.tile_slot_M.tolist() == tiles + [-1] * (plan.tiles - len(tiles))
    for pair, place in enumerate(plan.place_RK.flatten().tolist()):
        assert place == -1 if not 0 <= flat[pair] < slots else plan.pair_P[place] == pair


@pytest.mark.parametrize("rows", [0, 1, 50, 100])
def test_plan_is_stable_and_complete(device, rows):
    torch.manual_seed(3)
    check_plan(torch.randint(-1, 7, (rows, 3), device=device), 7, 16)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_plan_of_any_routing(device, data):
    """Ids past the slots are skipped like negative ones; int64 ids are welcome."""
    slots, choices = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    rows = data.draw(
        st.lists(st.lists(st.integers(-2, slots + 1), min_size=choices, max_size=choices), max_size=40)
    )
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    check_plan(
        torch.tensor(rows, dtype=kind, device=device).view(-1, choices),
        slots,
        data.draw(st.sampled_from([1, 4, 16])),
    )


def test_plan_never_needs_more_tiles_than_the_bound():
    for pairs in range(40):
        for slots in range(1, 9):
            spread = [pairs // slots + (s < pairs % slots) for s in range(slots)]
            ones = [1] * min(pairs, slots - 1) + [max(0, pairs - slots + 1)]
            for counts in (spread, ones):
                assert sum(-(-c // 4) for c in counts) <= most_tiles(pairs, slots, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("add", [False, True])
def test_combine_rows(device, close, dtype, add):
    torch.manual_seed(4)
    part_PH = torch.randn(12, 37).to(dtype)
    place_RK = torch.tensor([[0, 11, -1], [-1, -1, -1], [5, 5, 3]], dtype=torch.int32)
    out_RH = torch.full((3, 37), 0.5 if add else float("nan"), dtype=dtype, device=device)
    combine_rows(part_PH.to(device), place_RK.to(device), out_RH, add, columns=16)
    kept = (place_RK >= 0).double()
    close(out_RH, 0.5 * add + (kept[:, :, None] * part_PH.double()[place_RK.clamp(min=0).long()]).sum(1))


def small_experts(device, slots, dtype, hidden=40, inner=24):
    gate_up = (torch.randn(slots, 2 * inner, hidden) / hidden**0.5).to(dtype).to(device)
    return ExpertWeights(gate_up, (torch.randn(slots, hidden, inner) / inner**0.5).to(dtype).to(device))


def test_the_weight_of_a_skipped_slot_may_be_anything(device):
    torch.manual_seed(6)
    weights, x = small_experts(device, 3, torch.bfloat16), torch.randn(2, 40).bfloat16().to(device)
    slot = torch.tensor([[0, -1], [-1, 2]], dtype=torch.int32, device=device)
    weight = torch.tensor([[0.5, torch.nan], [torch.inf, 0.5]], device=device)
    out = torch.empty_like(x)
    expert_ffn(x, slot, weight, weights, SMALL, out)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_do_not_depend_on_where_experts_are(device, dtype):
    """The same rows over one node's slots, and over two nodes whose float32 partial sums are added: equal bits."""
    torch.manual_seed(5)
    slots, choices, rows = 6, 4, 9
    weights, x = small_experts(device, slots, dtype), torch.randn(rows, 40).to(dtype).to(device)
    slot_RK = torch.rand(rows, slots).topk(choices).indices.int().to(device)
    weight_RK = torch.rand(rows, choices).to(device)

    def partial(chosen):
        out = torch.empty(rows, 40, device=device)
        expert_ffn(x, torch.where(chosen, slot_RK, -1).int(), weight_RK, weights, SMALL, out)
        return out

    whole = partial(slot_RK >= 0)
    for first in ((0, 1, 2), (1, 4)):
        here = torch.isin(slot_RK, torch.tensor(first, dtype=torch.int32, device=device))
        assert torch.equal(partial(here) + partial(~here), whole)
        assert torch.equal(partial(~here) + partial(here), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_part_is_rounded_before_it_is_added(device, dtype):
    """Alone, weighted, a row's part is a value of the rows' dtype although the sum is float32."""
    torch.manual_seed(7)
    weights, x = small_experts(device, 2, dtype), torch.randn(5, 40).to(dtype).to(device)
    out = torch.empty(5, 40, device=device)
    slot = torch.ones(5, 1, dtype=torch.int32, device=device)
    expert_ffn(x, slot, torch.rand(5, 1).to(device), weights, SMALL, out)
    assert torch.equal(out, out.to(dtype).float())
