"""`bench.gpu_libraries` at tiny sizes, with doubles of libraries: what is told of right answers and of none."""

import sys

import pytest
import torch

from afserve.kernels.libraries.library import Libraries
from afserve.kernels.triton.backend import TritonBackend
from bench.gpu_libraries import Sizes, cases, main, rows_of
from tests.kernels.triton.test_library_fla import installed as installed  # the fixture

TINY = Sizes(256, 128, 2, 4, 2, 16, 20, values=2, tokens=40, block=16, rows=(2,), single=3)


def told(name, device):
    def seconds(call):
        call()
        return {"s": 1e-6, "captured": True}

    def opened():
        return TritonBackend(device, 2, libraries=Libraries.open_named(name, device))

    return list(rows_of(name, TritonBackend(device, 2), opened, TINY, seconds))


def test_ops_of_a_library_are_compared(installed, device, fp8):
    installed()
    rows = told("fla", device)
    assert [row["op"] for row in rows[:-1]] == [
        f"delta, by {rule}, {what}"
        for rule in ("head", "channel")
        for what in ("3 single tokens", "a prompt of 40")
    ]
    assert all(row["fine"] and row["own_us"] == row["library_us"] == 1.0 for row in rows[:-1]), rows
    assert rows[1]["tested"] == {"2 heads of 16 x 16 by head, torch.bfloat16": "right"}
    assert "fla-core 0.6.0 computes" in rows[-1]["explained"]


def test_every_op_runs(device, fp8):
    own = TritonBackend(device, 2)
    answers = {case.name: case.made(own)() for case in cases(TINY)}
    assert len(answers) == 8 and all(answer.isfinite().all() for answer in answers.values())


def test_a_library_that_is_not_there_is_a_row(device, monkeypatch, fp8):
    monkeypatch.setitem(sys.modules, "fla", None)
    (row,) = told("fla", device)
    assert row["library"] == "fla" and "pip install 'afserve[fla]'" in row["skipped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_elsewhere_it_says_so(capsys):
    assert main(["fla"]) == 0 and capsys.readouterr().out == "not measured: no CUDA device\n"
