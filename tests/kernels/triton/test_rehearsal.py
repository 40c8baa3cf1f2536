"""A node's exchange with itself before it is ready: what it sends comes back, and what does not is refused in words."""

import pytest
import torch

from tests.kernels.triton.symm_nodes import DEVICE, LONG  # first: interprets kernels where there is no GPU

from afserve.comm.device_exchange.ends import Patience, SymmExpert  # isort: skip
from afserve.comm.device_exchange.rehearsal import exchange_with_itself, rehearse
from afserve.comm.transport import Layout, WireType
from afserve.comm.transports import symm
from afserve.errors import ConfigError


def layout_of(wire, hidden=200, top_k=3, slots=5):
    return Layout(hidden, top_k, 512, 2, 4, slots, wire, WireType.FLOAT32, exchange=4)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("wire", [WireType.BFLOAT16, WireType.FLOAT8])
def test_rows_come_back(nodes, wire):
    layout = layout_of(wire)
    rehearse(layout, nodes, DEVICE, torch.bfloat16, LONG)
    x_TH, y_TH = exchange_with_itself(layout, nodes, DEVICE, torch.bfloat16, LONG)
    assert x_TH.unique().numel() == 7 and torch.allclose(y_TH, x_TH.float(), rtol=0.07)
    assert wire is WireType.FLOAT8 or y_TH.equal(x_TH.float())


def test_other_rows_are_refused(monkeypatch):
    answer = SymmExpert.answer
    monkeypatch.setattr(SymmExpert, "answer", lambda self, arrival, y_NH: answer(self, arrival, 2 * y_NH))
    with pytest.raises(ConfigError, match="leave --device-exchange out") as refused:
        rehearse(layout_of(WireType.BFLOAT16), 2, DEVICE, torch.bfloat16, LONG)
    assert refused.value.param == "device_exchange"


def test_a_message_that_does_not_come_is_refused(monkeypatch):
    """The sums are no numbers then."""
    monkeypatch.setattr(SymmExpert, "answer", lambda *_: None)
    with pytest.raises(ConfigError, match="leave --device-exchange out"):
        rehearse(layout_of(WireType.BFLOAT16), 2, DEVICE, torch.bfloat16, Patience(50, timed=False))


def test_a_flag_is_found_and_one_that_nobody_raised_is_not(monkeypatch):
    chip = DEVICE.type == "cuda"
    assert symm.rehearse(DEVICE, chip=chip)
    monkeypatch.setattr(symm, "_LIMIT_SECONDS", 0.01)
    monkeypatch.setattr("afserve.kernels.triton.symm.raise_flag", {(1,): lambda *_, **__: None})
    assert not symm.rehearse(DEVICE, chip=chip)
