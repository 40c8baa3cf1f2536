"""Stage times played over a few cores: the closed form where everybody has a core, bounds where nobody does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.placement.pipeline import StageTimes
from afserve.placement.planner.cores import CoreStages, step_seconds

LAYERS = 6
times = st.floats(2e-5, 1e-3)
counts = st.integers(1, 3)


@pytest.mark.slow
@given(attention=times, outside=times, expert=times, wire=st.floats(0, 1e-4), nodes=counts)
@settings(max_examples=30, deadline=None)
def test_one_micro_batch_with_cores_for_all_is_the_closed_form(
    attention: float, outside: float, expert: float, wire: float, nodes: int
) -> None:
    stages = CoreStages(attention, outside, (expert,), wire, wire)
    played = step_seconds(stages, cores=8, ranks=1, expert_nodes=nodes, micro_batches=1, layers=LAYERS)
    assert played == pytest.approx(StageTimes(attention, expert, wire, wire, outside).iteration(LAYERS, 1))


def test_ping_pong_with_cores_for_all_is_the_closed_form() -> None:
    stages = CoreStages(2e-4, 1e-4, (1.5e-4, 3e-4), 1e-5, 1e-5)
    played = step_seconds(stages, cores=8, ranks=1, expert_nodes=1, micro_batches=2, layers=LAYERS)
    closed = StageTimes(2e-4, 1.5e-4, 1e-5, 1e-5, 1e-4).iteration(LAYERS, 2)
    assert played == pytest.approx(closed, rel=0.05)


def test_one_core_does_one_thing_at_a_time() -> None:
    stages = CoreStages(2e-4, 1e-4, (1.5e-4,), 0.0, 0.0, gateway=5e-5)
    played = step_seconds(stages, cores=1, ranks=1, expert_nodes=2, micro_batches=1, layers=LAYERS)
    assert played == pytest.approx(LAYERS * (2e-4 + 2 * 1.5e-4) + 1e-4 + 5e-5)


def test_a_busy_neighbour_slows_down_what_overlaps_and_nothing_else() -> None:
    stages = CoreStages(2e-4, 1e-4, (2e-4, 4e-4), 0.0, 0.0, 0.0, 1.5, 1.5)
    chain = step_seconds(stages, cores=2, ranks=1, expert_nodes=1, micro_batches=1, layers=LAYERS)
    assert chain == pytest.approx(LAYERS * 4e-4 + 1e-4)
    pair = step_seconds(stages, cores=2, ranks=1, expert_nodes=1, micro_batches=2, layers=LAYERS)
    alone = step_seconds(
        CoreStages(2e-4, 1e-4, (2e-4, 4e-4), 0.0, 0.0),
        cores=2,
        ranks=1,
        expert_nodes=1,
        micro_batches=2,
        layers=LAYERS,
    )
    assert 1.2 * alone < pair <= 1.5 * alone


@pytest.mark.slow
@given(
    attention=times,
    outside=times,
    expert=times,
    gateway=times,
    ranks=counts,
    nodes=counts,
    m=counts,
    cores=counts,
)
@settings(max_examples=40, deadline=None)
def test_no_core_does_more_than_time_allows(
    attention: float,
    outside: float,
    expert: float,
    gateway: float,
    ranks: int,
    nodes: int,
    m: int,
    cores: int,
) -> None:
    """Neither a core nor a chain of one micro-batch; experts cost the same merged, so they are counted once."""
    stages = CoreStages(attention, outside, (expert,) * (ranks * m), 0.0, 0.0, gateway)
    played = step_seconds(
        stages, cores=cores, ranks=ranks, expert_nodes=nodes, micro_batches=m, layers=LAYERS
    )
    least = ranks * m * (LAYERS * attention + outside) + LAYERS * nodes * expert
    assert played >= 0.95 * least / cores
    assert played >= 0.999 * (LAYERS * (attention + expert) + outside)
    assert played >= 0.95 * m * (LAYERS * attention + outside)


def test_micro_batches_of_several_nodes_do_not_all_merge() -> None:
    """Four streams on two cores, merging almost for nothing: between everything merged and nothing merged."""
    stages = CoreStages(4e-4, 1e-3, (1.3e-3, 1.4e-3, 1.5e-3, 1.6e-3), 0.0, 0.0)
    played = step_seconds(stages, cores=3, ranks=2, expert_nodes=1, micro_batches=2, layers=LAYERS)
    assert LAYERS * 2 * 1.4e-3 < played < 1.05 * LAYERS * 4 * 1.3e-3


def test_the_fullest_node_is_another_in_every_layer() -> None:
    """Two nodes on one core do the mean twice, not the fullest node's work twice."""
    stages = CoreStages(2e-4, 1e-4, (3e-4,), 0.0, 0.0, others=(1e-4,))
    played = step_seconds(stages, cores=1, ranks=1, expert_nodes=2, micro_batches=1, layers=LAYERS)
    assert played == pytest.approx(LAYERS * (2e-4 + 3e-4 + 1e-4) + 1e-4)
