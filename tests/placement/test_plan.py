"""The placement value: what it refuses, what it remembers, what leads from one to another."""

import json

import numpy as np
import pytest

from afserve.errors import ConfigError
from afserve.placement.placement import FREE, Fill, LayerPlacement, Placement


def small(*, slots=((0, 1), (1, 2)), share=((1.0, 0.25), (0.75, 1.0)), epoch=0) -> Placement:
    return Placement(epoch, 2, 3, (LayerPlacement(slots, share),))


def test_json_there_and_back():
    placement = Placement(4, 2, 3, (LayerPlacement(((0, 1), (1, 2)), ((1.0, 0.25), (0.75, 1.0)), 7.5, 7.0),))
    again = Placement.from_json(placement.to_json())
    assert again == placement
    assert (again.layers[0].max_load, again.layers[0].lower_bound) == (7.5, 7.0)


def test_json_is_the_documented_file():
    raw = json.loads(small().to_json())
    assert raw["nodes"] == 2
    assert set(raw["layers"][0]) == {"slots", "share", "max_load", "lower_bound"}
    assert raw["layers"][0]["slots"] == [[0, 1], [1, 2]]


def test_json_without_the_optional_fields():
    raw = {"nodes": 2, "layers": [{"slots": [[0, 1], [1, 2]], "share": [[1, 0.25], [0.75, 1]]}]}
    placement = Placement.from_json(json.dumps(raw))
    assert (placement.experts, placement.epoch) == (3, 0)


def test_diff_counts_what_travels():
    old = small()
    new = small(slots=((0, 2), (1, 2)), share=((1.0, 0.5), (1.0, 0.5)), epoch=1)
    diff = old.diff(new)
    assert diff.fills == (Fill(layer=0, node=0, slot=1, expert=2, replaced=1),)
    assert diff.frees == ((0, 0, 1),)
    assert diff.moves == 1


def test_diff_inside_a_node_is_not_a_move():
    diff = small().diff(small(slots=((1, 0), (1, 2)), share=((0.25, 1.0), (0.75, 1.0))))
    assert len(diff.fills) == 2
    assert all(fill.local for fill in diff.fills)
    assert diff.moves == 0
    assert diff.frees == ()


def test_the_integers_of_a_fill_have_names():
    with pytest.raises(TypeError):
        Fill(0, 0, 1, 5)


def test_diff_with_another_model_is_refused():
    with pytest.raises(ConfigError, match="another model"):
        small().diff(Placement.contiguous(layers=2, experts=3, nodes=2))


def test_arrays_are_padded():
    placement = small(slots=((0, 1, 2), (1,)), share=((1.0, 0.5, 1.0), (0.5,)))
    assert placement.slot_array().tolist() == [[[0, 1, 2], [1, FREE, FREE]]]
    assert placement.share_array()[0, 1].tolist() == [0.5, 0.0, 0.0]
    assert placement.slot_array().dtype == np.int64


def test_arrays_are_shared_by_epochs_and_nobody_writes_into_them():
    placement = Placement.contiguous(layers=2, experts=4, nodes=2)
    later = placement.with_epoch(7)
    assert later.epoch == 7 and placement.epoch == 0 and later.layers is placement.layers
    assert later.slot_array() is placement.slot_array()
    with pytest.raises(ValueError, match="read-only"):
        placement.share_array()[0] = 0.5


def test_most_held_counts_experts_and_not_slots():
    rows = ((0, 1, FREE), (FREE, 2), ())
    placement = Placement(0, 3, 3, (LayerPlacement(rows, ((1.0, 1.0, 0.0), (0.0, 1.0), ())),))
    assert placement.most_held() == 2 and placement.slots_per_node() == 3


def test_contiguous_and_print():
    placement = Placement.contiguous(layers=2, experts=5, nodes=2, slots_per_node=4)
    assert placement.layers[0].slots == ((0, 1, 2, FREE), (3, 4, FREE, FREE))
    assert "2 layers of 5 experts on 2 nodes" in str(placement)
    assert next(placement.held(1)) == (0, 0, 3)
    with pytest.raises(ConfigError, match="slots per node"):
        Placement.contiguous(layers=1, experts=5, nodes=2, slots_per_node=2)
