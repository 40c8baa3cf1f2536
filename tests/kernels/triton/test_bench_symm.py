"""What `bench.m2n_cuda` times does what it says: every row comes back once from each node that it went to."""

import pytest
import torch

from bench import m2n_cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("wire", list(m2n_cuda.WIRES))
def test_a_round_trip(wire, nodes, monkeypatch, request):
    if wire == "fp8":
        request.getfixturevalue("fp8")
    monkeypatch.setattr(m2n_cuda, "ROWS", 6)
    monkeypatch.setattr(m2n_cuda, "HIDDEN", 256)
    turn, sent = m2n_cuda.one_process(wire, nodes, DEVICE)
    y_TH = turn()
    assert y_TH.shape == (6, 256) and (y_TH == y_TH[:, :1]).all()
    assert int(y_TH[:, 0].sum()) == sent  # each expert node answers ones
    assert sent == 6 or nodes > 1


def test_a_row_says_what_it_compares():
    found = {
        "wire": "fp8", "nodes": 8, "us_p50": 61.0, "us_p99": 70.2, "gb_s": 300.0, "of_copy": 0.25, "one_gpu": True
    }  # fmt: skip
    assert (
        m2n_cuda.line(found) == "fp8 1x8: 61.0 us p50, 70.2 us p99, 300.0 GB/s, 25% of a copy, all on one GPU"
    )
