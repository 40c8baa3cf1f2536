"""The seam between who plans and samples a step and who computes its layers.

A runner is chosen once, when a node is wired (`choose.py`). Shapes: R rows that are read, H hidden.
"""

from collections.abc import Generator
from typing import Protocol, TypeVar

from torch import Tensor

from afserve.comm.m2n.link_contract import SentTicket
from afserve.engine.step.step_input import StepInput

T = TypeVar("T", bound=SentTicket)
T_co = TypeVar("T_co", bound=SentTicket, covariant=True)
StepRun = Generator[T | None, None, Tensor]
"""Yields the ticket of rows that are at the expert nodes, or None while other nodes' part of a shared prompt is not
there; returns rows_RH."""


class StepRunner(Protocol[T_co]):
    """Computes the steps of one micro-batch, one at a time."""

    def run_step(self, step: StepInput) -> StepRun[T_co]:
        """What the last layer gives for the rows that are read, (R, H). Keys and values of all tokens are written, and
        which experts the rows chose is counted. Raises Abandoned where other nodes' part of a shared prompt does not
        come: the step left nothing behind then."""

    def take_failures(self) -> dict[int, str]:
        """Of the step that ran last: why a chunk gave nothing, by its index. Once per step; waits for a device."""
