"""Instruction sets: which ones there are, which one is taken, and how far apart their results may be.

Inside one set a result has the same bits in any batch, on any node and thread. Between two sets it differs by the
order of sums, by how rows are rounded for weights of few bits, and so by a rounding of bfloat16 here and there.
"""

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

import afserve.kernels
from afserve.config import AUTO, ISAS
from afserve.errors import ConfigError
from afserve.kernels import isa
from afserve.kernels.formats.ggml import TYPES
from afserve.kernels.grouped import Groups
from afserve.kernels.isa import check_isa, isas_here, used_isa
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.packed import ExpertShape
from tests.kernels.packing import BYTE_SETS
from tests.kernels.test_ggml import usual

NATIVE = Path(__file__).parents[2] / "kernels" / "native"
F32, BF16 = torch.float32, torch.bfloat16
KINDS = {  # dtype of rows, how weights are kept, and bounds as shares of the results' size: a product, an expert
    "float32": (F32, {}, 4e-6, 8e-6),
    "bfloat16": (BF16, {}, 8e-6, 0.04),
    "int8": (BF16, {"int8": True}, 5e-4, 0.04),
    "int4": (BF16, {"int4": Groups(32)}, 5e-4, 0.04),
    "Q5_K": (BF16, {}, 5e-4, 0.04),
}
# The same of BYTE_SETS with fewer bits than bfloat16's: by rows of 8 bits with a scale for every 32 numbers.
COARSE = 0.04, 0.15


def test_every_set_of_the_library_can_be_named() -> None:
    found = re.findall(
        r"^Isa\* (\w+)_isa\(\);|^const Isa\* (\w+)_isa\(\);", (NATIVE / "isa.cpp").read_text(), re.M
    )
    assert {a or b for a, b in found} == set(ISAS)


def test_the_best_one_is_taken(ops: Ops) -> None:
    assert open_ops("cpu").isa == isas_here()[0] == used_isa(AUTO) and ops.isa in isas_here()
    assert list(isas_here()) == sorted(isas_here(), key=ISAS.index) and isas_here()[-1] == "generic"


def test_what_the_machine_has_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "isas_here", lambda: ("avx2", "generic"))
    check_isa("avx2")
    check_isa(AUTO)
    with pytest.raises(
        ConfigError, match=r"--isa: amx does not run on .*, which has avx2, generic"
    ) as refused:
        check_isa("amx")
    assert refused.value.param == "isa"


def test_without_the_library_there_is_no_set(monkeypatch: pytest.MonkeyPatch) -> None:
    isas_here.cache_clear()
    monkeypatch.setitem(sys.modules, "afserve.kernels._native", None)
    monkeypatch.delattr(afserve.kernels, "_native", raising=False)
    try:
        assert isas_here() == () and used_isa() == ""
        with pytest.raises(ConfigError, match="has no native library"):
            check_isa("generic")
    finally:
        isas_here.cache_clear()


def apart(results: dict[str, torch.Tensor]) -> float:
    """The largest difference of any two, as a share of the size of the results."""
    size = next(iter(results.values())).square().mean().sqrt()
    pairs = combinations(results.values(), 2)
    return max(((a - b).abs().max() / size).item() for a, b in pairs) if len(results) > 1 else 0.0


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_sets_are_no_further_apart_than_rounding(kind: str, rows: int) -> None:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    dtype, kept, product, expert = KINDS[kind]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1024, generator=generator).to(dtype)
    weight = torch.randn(192, 1024, generator=generator).to(dtype) / 32
    gate_up, down = (torch.randn(*s, generator=generator).to(dtype) / 32 for s in ((512, 1024), (1024, 256)))
    slot, share = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
    products, experts = {}, {}
    for name in isas_here():
        ops, out = open_ops("cpu", 1, isa=name), torch.empty(rows, 1024)
        if kind in TYPES:
            assert ops.ggml is not None
            packed = ops.ggml.pack_linear([usual(kind, 192, 1024, rows)], None, dtype)
            slots = ops.ggml.empty_experts(ExpertShape(1, 1024, 256, dtype), (kind, kind))
            ops.ggml.set_expert(slots, 0, usual(kind, 512, 1024, 2), usual(kind, 1024, 256, 3))
        else:
            packed = ops.pack_linear(weight, **kept)
            slots = ops.empty_experts(1, 1024, 256, dtype, **kept)
            ops.set_expert(slots, 0, gate_up, down)
        products[name] = ops.logits(x, packed)
        ops.expert_ffn(x, slot, share, slots, out)
        experts[name] = out
    if kind in ("int8", "int4", *TYPES):
        assert apart(products) <= COARSE[0] and apart(experts) <= COARSE[1]
        for results in (products, experts):
            for name in BYTE_SETS:
                results.pop(name, None)
    assert apart(products) <= product and apart(experts) <= expert
