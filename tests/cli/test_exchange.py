"""The bank of `bench calibrate` that computes nothing."""

import torch

from afserve.cli.bench.exchange import Idle


def test_what_lay_in_the_memory_is_not_answered():
    """Rows that are not finite would end the requests whose exchange is measured."""
    out_RH, none = torch.full((3, 8), torch.nan), torch.empty(0)
    Idle().forward(0, none, none, none, out_RH)
    assert (out_RH == 0).all()
    out_RH.fill_(2.0)
    Idle().forward(0, none, none, none, out_RH, add=True)
    assert (out_RH == 2).all()
