"""Every launch compiles for chips that are not here and keeps its compile budget (`bench/gpu_budget.jsonl`): with
`make test` the group that was hardest to fit, for Hopper, every night all of them for Hopper and Blackwell."""

import json
import os

import pytest
import triton

from bench.gpu_budget import budget, faults
from tests.warm.interpreter import WARM

HARDEST = ("mla-64",)
REACHED = {  # instructions that a rate close to the chip's needs, on Hopper
    "_gate_up": {"HGMMA", "QGMMA"}, "_down": {"HGMMA", "QGMMA"}, "_chunks": {"HGMMA"}, "_attend_latent": {"HGMMA"},
}  # fmt: skip


def test_what_the_tests_interpret_is_not_interpreted_elsewhere():
    """Triton's knobs write environment variables, which the processes that tests start would inherit."""
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("arch", "groups"),
    [
        (90, HARDEST),
        pytest.param(90, (), marks=pytest.mark.long),
        pytest.param(100, (), marks=pytest.mark.long),
    ],
)
def test_kernels_keep_their_budget(kept, monkeypatch, arch, groups):
    """What was compiled for an earlier run, of the same source by the same compiler, Triton finds again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept("afserve-triton")))
    only = [word for group in groups for word in ("--only", group)]
    done = WARM.said("bench.gpu_compile", str(arch), *only, seconds=3500.0)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    known = budget()
    assert [line for kernel in kernels for line in faults(kernel, known)] == []
    if triton.__version__ == "3.9.0":  # constraints.txt's
        missing = {(k["case"], k["kernel"]) for k in kernels} - {(case, name) for _, _, case, name in known}
        assert missing == set(), "python -m bench.gpu_first_run --compile-only --write-budget"
    if arch == 90 and not groups:
        found = {name: {i for k in kernels if k["kernel"] == name for i in k["matrix"]} for name in REACHED}
        assert {name: REACHED[name] - found[name] for name in REACHED} == {name: set() for name in REACHED}
