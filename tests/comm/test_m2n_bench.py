"""`bench.m2n` plays the wires of a deployment: what changes of a header or a transport reaches it too."""

import pytest

from bench.m2n import measure, row
from bench.m2n_wires import Case


@pytest.mark.process
@pytest.mark.parametrize("wire", ["shm", "tcp"])
def test_every_round_trip_comes_back(wire, tmp_path):
    case = Case(wire, 4096, attention=1, experts=2, rounds=5, warm=1, folder=str(tmp_path))
    seconds = measure(case, 30.0)
    assert len(seconds) == 5 and all(one > 0 for one in seconds)
    assert row(case, seconds, busy=False)["pairs"] == "1x2"
