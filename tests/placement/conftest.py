"""A plan from the command line looks last from how many more devices the answer turns: three to eight searches more,
which few tests look at. By day those ask for `larger_pools`; by night all plans look."""

from collections.abc import Iterator

import pytest

from afserve.placement.planner.scale import on_more_devices

LOOK = "afserve.cli.plan.answer.on_more_devices"


@pytest.fixture(scope="package", autouse=True)
def no_larger_pools(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--whole"):
            patch.setattr(LOOK, lambda question, found: "")
        yield


@pytest.fixture
def larger_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOOK, on_more_devices)
