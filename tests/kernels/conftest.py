"""Backends to test against the reference: every instruction set of the native library that runs here, the best first.

A test of a backend fails when an op ran in PyTorch instead: it would compare the truth with itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from afserve.config import AUTO
from afserve.errors import ConfigError
from afserve.kernels.isa import isas_here
from afserve.kernels.ops import Ops, open_ops

# Thousands of cases stand for each: those of other processors are not even made, to be skipped.
SETS = isas_here() or (AUTO,)


def native(isa: str, threads: int) -> Ops:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    try:
        return open_ops("cpu", threads, "native", isa or AUTO)
    except ConfigError as error:
        pytest.skip(str(error))


@contextmanager
def on_their_own(*backends: Ops) -> Iterator[None]:
    yield
    for ops in backends:
        assert ops.fallbacks() == (), f"{ops.backend_name} did not run all of this itself"


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    made = native(request.param, 1)
    with on_their_own(made):
        yield made


@pytest.fixture(params=SETS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Ops, Ops]]:
    """One instruction set with one thread and with three."""
    made = native(request.param, 1), native(request.param, 3)
    with on_their_own(*made):
        yield made


@pytest.fixture(params=SETS)
def falling(request: pytest.FixtureRequest) -> Ops:
    """For tests of what the library does not take: they say themselves which ops fell back."""
    return native(request.param, 1)


@pytest.fixture
def truth() -> Ops:
    return open_ops("cpu", 1, "torch")
