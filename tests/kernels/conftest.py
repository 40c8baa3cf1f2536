"""Backends to test against the reference: every instruction set of the native library that runs here."""

import pytest

from afserve.kernels.ops import Ops, open_ops

ISAS = ("amx", "avx512bf16", "avx512", "avx2", "generic")


def _native(isa: str, threads: int) -> Ops:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    try:
        return open_ops("cpu", threads, "native", isa)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return _native(request.param, 1)


@pytest.fixture(params=ISAS)
def pair(request: pytest.FixtureRequest) -> tuple[Ops, Ops]:
    """One instruction set with one thread and with three."""
    return _native(request.param, 1), _native(request.param, 3)


@pytest.fixture
def truth() -> Ops:
    return open_ops("cpu", 1, "torch")
