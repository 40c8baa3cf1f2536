"""Backends to test against the reference: every instruction set of the native library that runs here.

A test of a backend fails when an op ran in PyTorch instead: it would compare the truth with itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from afserve.config import AUTO, ISAS
from afserve.errors import ConfigError
from afserve.kernels.ops import Ops, open_ops


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


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    made = native(request.param, 1)
    with on_their_own(made):
        yield made


@pytest.fixture(params=ISAS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Ops, Ops]]:
    """One instruction set with one thread and with three."""
    made = native(request.param, 1), native(request.param, 3)
    with on_their_own(*made):
        yield made


@pytest.fixture(params=ISAS)
def falling(request: pytest.FixtureRequest) -> Ops:
    """For tests of what the library does not take: they say themselves which ops fell back."""
    return native(request.param, 1)


@pytest.fixture
def truth() -> Ops:
    return open_ops("cpu", 1, "torch")
