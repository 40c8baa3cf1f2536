"""The native split of a dispatch is the PyTorch one, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.m2n.routes import RouteTable
from afserve.comm.m2n.rows import DeviceSplit, NativeSplit, Splitter, TorchSplit
from afserve.comm.native import native_library
from afserve.comm.transport import NO_SLOT, Header, Kind, Parcel, WireType
from afserve.placement.placement import FREE, LayerPlacement, Placement

EXPERTS = 6


@st.composite
def layers(draw):
    nodes = draw(st.integers(1, 4))
    homes = [draw(st.sets(st.integers(0, nodes - 1), min_size=1)) for _ in range(EXPERTS)]
    slots, share = [], []
    for node in range(nodes):
        held = [e for e in range(EXPERTS) if node in homes[e]]
        row = draw(st.permutations(held + [FREE] * (7 - len(held))))
        slots.append(tuple(row))
        share.append(tuple(0.0 if e == FREE else 1.0 / len(homes[e]) for e in row))
    return LayerPlacement(tuple(slots), tuple(share))


def parcel(rows, hidden, choices, dtype):
    header = Header(Kind.DISPATCH, 0, 0, 0, rows, WireType.FLOAT32)
    slot_RK = torch.full((rows, choices), -7, dtype=torch.int32)
    return Parcel(header, torch.zeros(rows, hidden, dtype=dtype), slot_RK, torch.zeros(rows, choices))


@given(
    layer=layers(),
    rows=st.integers(1, 9),
    hidden=st.sampled_from([1, 3, 8, 21]),
    choices=st.integers(1, 4),
    dtypes=st.sampled_from([(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float16)]),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_native_and_torch_agree(layer, rows, hidden, choices, dtypes, wide, seed):
    native = native_library()
    if native is None:
        pytest.skip("the native library is not built")
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(rows, hidden + 2, generator=generator).to(dtypes[0])[:, 1:-1]
    expert_TK = torch.randint(-1, EXPERTS, (rows, choices), generator=generator)
    expert_TK = expert_TK if wide else expert_TK.int()
    weight_TK = torch.rand(rows, choices, generator=generator)
    placement = Placement(0, len(layer.slots), EXPERTS, (layer,))
    routes = RouteTable(placement, 7, native).layers[0]
    theirs = Splitter(native).split(routes, x_TH, expert_TK, weight_TK)
    ours = Splitter(None).split(routes, x_TH, expert_TK, weight_TK)
    assert isinstance(theirs, NativeSplit) and isinstance(ours, TorchSplit)
    if placement.nodes == 1:
        keep = (expert_TK >= 0).any(1)
        assert theirs.parts() == ([(0, int(keep.sum()))] if keep.any() else [])
        if not keep.all():
            return
    assert theirs.parts() == ours.parts()
    sums = torch.zeros(rows, hidden), torch.zeros(rows, hidden)
    for node, count in ours.parts():
        filled = [parcel(count, hidden, choices, dtypes[1]) for _ in range(2)]
        for split, into in zip((theirs, ours), filled):
            split.fill(node, into)
        assert torch.equal(filled[0].slot_RK, filled[1].slot_RK)
        assert torch.equal(filled[0].weight_RK, filled[1].weight_RK)
        assert torch.equal(filled[0].x_RH, filled[1].x_RH)
        if placement.nodes > 1:
            for split, total in zip((theirs, ours), sums):
                split.add(node, filled[0].x_RH, total)
    assert torch.equal(*sums)


def test_expert_ids_out_of_range_are_nobodys():
    native = native_library()
    if native is None:
        pytest.skip("the native library is not built")
    placement = Placement.contiguous(layers=1, experts=4, nodes=2)
    routes = RouteTable(placement, 2, native).layers[0]
    expert_TK = torch.tensor([[4, -9], [1 << 40, 3]])
    split = Splitter(native).split(routes, torch.ones(2, 8), expert_TK, torch.ones(2, 2))
    assert split.parts() == [(1, 1)]


@given(layer=layers(), rows=st.integers(1, 9), choices=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_all_rows_to_every_node_give_the_same_sums(layer, rows, choices, seed):
    """The split of a device, whose shapes do not depend on the choices, beside the one that sends no row in vain."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(rows, 8, generator=generator)
    expert_TK = torch.randint(0, EXPERTS, (rows, choices), generator=generator)
    weight_TK = torch.rand(rows, choices, generator=generator)
    placement = Placement(0, len(layer.slots), EXPERTS, (layer,))
    routes = RouteTable(placement, 7).layers[0]
    sums = []
    for split in (
        DeviceSplit(routes, x_TH, expert_TK, weight_TK),
        TorchSplit(routes, x_TH, expert_TK, weight_TK),
    ):
        y_TH = torch.zeros(rows, 8)
        for node, count in split.parts():
            into = parcel(count, 8, choices, torch.float32)
            split.fill(node, into)
            assert int(into.slot_RK.min()) >= NO_SLOT and int(into.slot_RK.max()) < 7
            factor_RK = into.weight_RK.masked_fill(into.slot_RK == NO_SLOT, 0.0)
            part_RH = (factor_RK * (into.slot_RK + 1)).sum(1, keepdim=True) * into.x_RH
            if placement.nodes == 1:
                y_TH += part_RH
            else:
                split.add(node, part_RH, y_TH)
        sums.append(y_TH)
    assert torch.equal(*sums)
    assert DeviceSplit(routes, x_TH, expert_TK, weight_TK).parts() == [
        (n, rows) for n in range(placement.nodes)
    ]
