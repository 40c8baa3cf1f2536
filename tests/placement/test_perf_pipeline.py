"""The closed form of the ping-pong: MegaScale-Infer's conditions, and agreement with itself at the edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.placement.pipeline import StageTimes, larger, layer_period

times = st.floats(1e-6, 1e-2)


@pytest.mark.parametrize(("transfer", "needed"), [(0.0, 2), (0.1, 3), (0.5, 3), (0.51, 4), (1.0, 4)])
def test_least_micro_batches_follow_the_ratio_of_transfer_and_stage(transfer: float, needed: int) -> None:
    assert StageTimes(1.0, 1.0, transfer, transfer).minimum_micro_batches() == needed


@given(times, times, times, times)
def test_enough_micro_batches_leave_only_the_busiest_station(a: float, e: float, d: float, c: float) -> None:
    stages = StageTimes(a, e, d, c)
    m = stages.minimum_micro_batches()
    assert stages.period(m) == pytest.approx(m * stages.station, rel=1e-6)
    assert m == 1 or stages.period(m - 1) > (m - 1) * stages.station * (1 - 1e-9)


@given(times, times, times, times, st.integers(1, 4), st.integers(1, 80), st.floats(0, 1e-2))
def test_iteration_is_at_least_every_station_work(
    a: float, e: float, d: float, c: float, m: int, layers: int, outside: float
) -> None:
    stages = StageTimes(a, e, d, c, outside)
    step = stages.iteration(layers, m)
    assert step >= m * (layers * a + outside) * (1 - 1e-9)
    assert step >= layers * m * max(e, d, c) * (1 - 1e-9)
    assert step >= layers * stages.round_trip * (1 - 1e-9)
    assert all(0 <= idle <= 1 for idle in stages.bubbles(layers, m).values())


def test_period_of_arrays_is_the_period_of_each_element() -> None:
    a, e = np.array([1.0, 3.0]), np.array([2.0, 1.0])
    found = layer_period(a, e, 0.1 * a, 0.1 * e, 2)
    assert found.tolist() == [StageTimes(x, y, 0.1 * x, 0.1 * y).period(2) for x, y in zip(a, e, strict=True)]


def test_larger_serves_floats_and_arrays() -> None:
    assert larger(1.0, 2.5) == 2.5
    assert larger(np.array([1.0, 4.0]), np.array([2.0, 3.0])).tolist() == [2.0, 4.0]


def test_stages_without_work_need_one_micro_batch() -> None:
    assert StageTimes(0.0, 0.0, 0.0, 0.0).minimum_micro_batches() == 1
