"""What these tests read of the source is trees without circles."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_circles_are_looked_for() -> Iterator[None]:
    """In millions of nodes, again and again while they are made: half of the time."""
    gc.disable()
    yield
    gc.enable()
