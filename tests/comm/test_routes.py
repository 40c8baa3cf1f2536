"""Slots and replicas: the placement's shares are met, and a row's choice does not depend on its batch."""

import pytest
import torch

from afserve.comm.m2n.routes import RouteTable, row_number
from afserve.errors import ConfigError
from afserve.placement.placement import FREE, LayerPlacement, Placement


def two_nodes(share):
    """Expert 0 on both nodes, 1 on the first, 2 on the second."""
    layer = LayerPlacement(((0, 1, FREE), (2, FREE, 0)), ((share, 1.0, 0.0), (1.0, 0.0, 1.0 - share)))
    return Placement(3, 2, 3, (layer,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.7, 1.0])
def test_shares_are_met(share, dtype):
    x_TH = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expert_TK = torch.zeros(4000, 1, dtype=torch.int32)
    slot_TK = RouteTable(two_nodes(share), 3).layers[0].choose(x_TH, expert_TK)
    assert set(slot_TK.flatten().tolist()) <= {0, 5}
    assert float((slot_TK == 0).float().mean()) == pytest.approx(share, abs=0.03)


def test_single_replicas_and_no_expert():
    expert_TK = torch.tensor([[1, 2], [-1, 1]])
    slot_TK = RouteTable(two_nodes(0.5), 3).layers[0].choose(torch.randn(2, 8), expert_TK)
    assert slot_TK.tolist() == [[1, 3], [-1, 1]]


def test_a_rows_choice_does_not_depend_on_its_batch():
    x_TH = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    expert_TK = torch.zeros(64, 2, dtype=torch.int64)
    layer = RouteTable(two_nodes(0.5), 3).layers[0]
    whole_TK = layer.choose(x_TH, expert_TK)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(layer.choose(x_TH[order], expert_TK[order]), whole_TK[order])
    for row in (0, 17, 63):
        assert torch.equal(layer.choose(x_TH[row : row + 1], expert_TK[row : row + 1])[0], whole_TK[row])


def test_experts_replicated_alike_keep_a_row_on_one_node():
    layer = LayerPlacement(((0, 1, 2), (0, 1, 2)), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    table = RouteTable(Placement(0, 2, 3, (layer,)), 3)
    expert_TK = torch.tensor([[0, 1, 2]] * 100)
    node_TK = table.layers[0].choose(torch.randn(100, 32), expert_TK) // 3
    assert (node_TK == node_TK[:, :1]).all()
    assert 0 < int(node_TK[:, 0].sum()) < 100


@pytest.mark.parametrize("hidden", [1, 3, 4, 9])
def test_narrow_rows_have_a_number_too(hidden):
    number_T = row_number(torch.randn(50, hidden))
    assert ((number_T >= 0) & (number_T < 1)).all()
    assert len(set(number_T.tolist())) > 40


def test_a_placement_with_more_slots_than_the_nodes_have_is_refused():
    with pytest.raises(ConfigError, match="3 slots per expert node, they have 2"):
        RouteTable(two_nodes(0.5), 2)
