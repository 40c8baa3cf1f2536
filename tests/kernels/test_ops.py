"""The door: which backend opens, what it says about itself, and which argument a refusal names."""

import sys

import pytest
import torch

from afserve.config import EngineSettings
from afserve.errors import ConfigError
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring


def test_the_native_library_is_taken_when_it_is_there() -> None:
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    ops = open_ops("cpu", 2)
    assert ops.backend_name == "native"
    assert "instructions, 2 thread(s)" in ops.explain()
    assert "generic" in open_ops("cpu", 1, isa="generic").explain()
    with pytest.raises(
        ConfigError, match=r"--isa: mmx does not run on .*, which has .*generic; leave it out"
    ):
        open_ops("cpu", 1, isa="mmx")


def test_without_the_library_pytorch_does_the_work_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "afserve.kernels.native", None)
    ops = open_ops("cpu", 1)
    assert ops.backend_name == "torch"
    assert "the native library was not built" in ops.explain()
    with pytest.raises(ConfigError, match="reinstall with a compiler"):
        open_ops("cpu", 1, backend="native")


def test_an_instruction_set_is_never_ignored() -> None:
    with pytest.raises(ConfigError, match="--isa: generic is of the native library"):
        open_ops("cpu", 1, backend="torch", isa="generic")
    with pytest.raises(ConfigError, match="--isa: generic is of the kernels of CPUs"):
        EngineSettings(device="cuda", isa="generic")


def test_rows_of_another_dtype_are_converted_to_the_weights(ops: Ops) -> None:
    packed = ops.pack_linear(torch.randn(40, 32).bfloat16())
    x = torch.randn(3, 32).bfloat16()
    assert torch.equal(ops.linear(x.double(), packed), ops.linear(x, packed).double())


def test_refusals_name_the_argument(ops: Ops) -> None:
    x = torch.zeros(2, 16)
    packed = ops.pack_linear(torch.zeros(8, 16))
    experts = ops.empty_experts(2, 16, 8, torch.float32)
    batch = PagedBatch(
        torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), 1, 1,
    )  # fmt: skip
    cache, slot = torch.zeros(1, 2, 16, 16), torch.zeros(2, 1, dtype=torch.int32)
    calls = {
        "weight_OI": lambda: ops.pack_linear(x[0]),
        "bias_O": lambda: ops.pack_linear(torch.zeros(8, 16), torch.zeros(9)),
        "weight_H": lambda: ops.rms_norm(x, torch.zeros(15), 1e-6),
        "y_TH": lambda: ops.add_rms_norm(x, x[:1], torch.zeros(16), 1e-6),
        "x_TI": lambda: ops.linear(x[:, :8], packed),
        "gate_up_JH": lambda: ops.set_expert(experts, 0, torch.zeros(8, 16), torch.zeros(16, 8)),
        "slot": lambda: ops.set_expert(experts, 2, torch.zeros(16, 16), torch.zeros(16, 8)),
        "x_RH": lambda: ops.expert_ffn(x[:, :8], slot, slot.float(), experts, x),
        "out_RH": lambda: ops.expert_ffn(x, slot, slot.float(), experts, x[:1]),
        "weight_RK": lambda: ops.expert_ffn(x, slot, slot[:1].float(), experts, x),
        "q_TAD": lambda: ops.attend_gqa(torch.zeros(1, 3, 16), cache, cache, batch, 1.0),
        "k_TGD": lambda: ops.write_kv(x[:1, None], x[:1, None], cache, cache, batch.kv_slot_T),
        "q_TAC": lambda: ops.attend_mla(torch.zeros(1, 2, 15), cache[0], 8, batch, 1.0),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(ValueError, match="x_TH"):
        ops.route(x, torch.zeros(4, 15), None, RouterRule(1, Scoring.SOFTMAX))
