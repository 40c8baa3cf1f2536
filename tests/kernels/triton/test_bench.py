"""The CUDA bench's cases at tiny sizes: each runs, and computes what its torch peer computes; a failure ends no run."""

import json

import pytest
import torch

from afserve.kernels.triton.backend import TritonBackend
from bench.cuda_cases import (
    SMALL,
    Experts,
    Planned,
    expert_case,
    gqa_case,
    groups,
    linear_case,
    mla_case,
    small_case,
)
from bench.cuda_clock import Case, Limits
from bench.cuda_rows import measure, row_of
from bench.kernels_cuda import GROUPS, line, main

LIMITS = Limits(copy=100.0, bf16=1000.0, fp8=2000.0)


@pytest.fixture
def ops(device):
    return TritonBackend(device, multiprocessors=2)


class Pretend:
    """A clock that runs the call and says how long it took, without looking."""

    def __init__(self, seconds=10.0):
        self._seconds = seconds

    def seconds(self, run):
        run()
        return [self._seconds] * 10


def test_experts_and_their_peer(device):
    torch.manual_seed(0)
    case = expert_case(device, False, 3, 16, hidden=64, inner=32)
    out = case.run()
    assert torch.allclose(out[: 3 * 16].float(), case.peer().float(), atol=0.05)
    assert case.flops == 2 * 48 * 3 * 64 * 32 and case.bars == {"of_bound": 0.8, "peer_ratio": 1.0}


def test_fp8_experts_run(device, fp8):
    case = Experts(device, hidden=256, inner=128).case(True, 2, 1)
    assert torch.isfinite(case.run()[0]).all() and case.peer is None and case.rate == "fp8"


def test_weights_are_made_once_for_all_rows(device):
    experts = Experts(device, hidden=32, inner=16)
    experts.case(False, 2, 1)
    kept = experts._weights
    experts.case(False, 2, 4)
    assert experts._weights is kept
    experts.case(False, 3, 1)
    assert experts._weights is not kept


@pytest.mark.parametrize(
    ("queries", "context", "kv", "off"),
    [(1, 20, "", 0.03), (12, 12, "", 0.03), (1, 20, "int8", 0.05), (1, 20, "fp8", 0.15)],
)
def test_gqa_and_its_peer(ops, fp8, queries, context, kv, off):
    torch.manual_seed(1)
    case = gqa_case(ops, 2, queries, context, heads=4, groups=2, size=16, block=8, kv=kv)
    peer = case.peer().transpose(1, 2).flatten(0, 1)
    assert torch.allclose(case.run().float(), peer.float(), atol=off)


def test_a_linear_map_in_fp8_and_its_peer(ops, fp8):
    case = linear_case(ops, 3, 128, 256)
    peer = case.peer().float()
    assert (case.run().float() - peer).norm() < 0.06 * peer.norm() and case.bytes == 128 * 256 + 6 * 384


def test_other_cases_run(ops, fp8):
    for kv in ("", "int8", "fp8"):
        assert mla_case(ops, 2, 20, 3, rank=16, rope=8, block=8, kv=kv).run().isfinite().all()
    for op in SMALL:
        case = small_case(ops, op, 2, hidden=64, experts=32)
        assert case.bytes > 0
        case.run()


def test_the_plan_has_the_sizes_that_the_bars_are_about(ops):
    planned = groups(ops)
    assert set(planned) == set(GROUPS)
    names = {p.name for p in planned["experts"]}
    for kind in ("bf16", "fp8"):
        assert f"{kind} E8 rows4096" in names
        assert {f"{kind} E{n} rows{rows}" for n in (8, 64) for rows in (1, 128)} <= names
    assert {"A128 batch32", "A128 batch128"} <= {p.name for p in planned["mla"]}
    without = groups(TritonBackend(ops.device, 2, has_fp8=False))
    assert not any("fp8" in p.name for group in without.values() for p in group)


def test_the_slower_limit_binds():
    assert LIMITS.seconds(Case("op", "", lambda: None, bytes=500, flops=1000)) == 5.0
    assert LIMITS.seconds(Case("op", "", lambda: None, bytes=50, flops=4000)) == 4.0
    assert LIMITS.seconds(Case("op", "", lambda: None, bytes=50, flops=4000, rate="fp8")) == 2.0


def test_a_row_and_its_bars():
    bars = {"of_bound": 0.6, "peer_ratio": 1.5}
    case = Case("op", "x", lambda: None, 500, 1000, peer=lambda: None, bars=bars)
    row = row_of(case, LIMITS, Pretend())
    assert row["of_bound"] == row["of_copy"] == 0.5 and row["peer_ratio"] == 1.0
    assert row["missed"] == ["of_bound", "peer_ratio"]
    json.dumps(row)
    assert "50% of bound" in line(row)


def broken():
    raise RuntimeError("no such instruction\nand more")


def test_a_failure_ends_no_run(device):
    cases = [
        Planned("one", lambda: Case("op", "one", lambda: None, 1)),
        Planned("no memory", broken),
        Planned("does not run", lambda: Case("op", "x", broken, 1)),
        Planned(
            "no peer", lambda: Case("op", "peer", lambda: None, 1, peer=broken, bars={"peer_ratio": 1.0})
        ),
    ]
    rows = []
    measure(cases, LIMITS, Pretend(), rows.append, torch.device("cpu"))
    assert [row.get("error") for row in rows] == [None, *["RuntimeError: no such instruction"] * 2, None]
    assert rows[3]["peer_error"] and rows[3]["missed"] == ["peer_ratio"]
    assert "no memory" in line(rows[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_device_nothing_is_written(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["--out", str(out)]) == 0
    assert "not measured" in capsys.readouterr().out and not out.exists()
