"""The seam between who plans and samples a step and who computes its layers.

A runner is chosen once, when a node is wired (`choose.py`). Shapes: R rows that are read, H hidden.
"""

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from afserve.comm.m2n.link_contract import SentTicket
from afserve.engine.step.step_input import StepInput
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import DraftChain

T = TypeVar("T", bound=SentTicket)
T_co = TypeVar("T_co", bound=SentTicket, covariant=True)
StepRun = Generator[T | None, None, Tensor]
"""Yields the ticket of rows that are at the expert nodes, or None while other nodes' part of a shared prompt is not
there, and between two layers of what is computed ahead; returns rows_RH."""


class StepRunner(Protocol[T_co]):
    """Computes the steps of one micro-batch, one at a time."""

    def run_step(self, step: StepInput) -> StepRun[T_co]:
        """What the last layer gives for the rows that are read, (R, H). Keys and values of all tokens are written.
        Raises Abandoned where other nodes' part of a shared prompt does not come, and where that is thrown into it
        between two layers: the step left nothing behind then."""

    def decode_step(
        self, step: StepInput, passes: int, stops: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        """Greedy steps of sequences that have one row each, in one call: by pass, each sequence's token. It ends behind
        the token that is one of a sequence's `stops`, and before a pass that gives anybody none. Without a pass it left
        nothing behind: the step has to be run. Not to be asked without `most_passes`. Raises StatesMoved where states
        moved on in such a pass: no token of the call counts then."""

    @property
    def most_passes(self) -> int:
        """Of `decode_step`; 0 where there is no such call."""

    def settle_step(self, step: StepInput) -> StepRun[T_co] | None:
        """Of the step that ran last, once a device has done it: None where its rows count, and the experts that they
        chose are counted then. Else the step once more, to be settled like the first."""

    def worst_mark(self) -> Tensor | None:
        """Of the step that ran last, one number on the device that `take_failures` would wait for; None where it waits
        for nothing."""

    def take_failures(self, worst: int | None = None) -> dict[int, str]:
        """Of the step that ran last: why a chunk gave nothing, by its index. Once per step; without the number that
        `worst_mark` was it waits for a device."""


class PredictorRunner(StepRunner[T_co], Protocol[T_co]):
    """Also of what guesses behind a step, a layer of multi-token prediction or a head, where the model has one."""

    def chain(self) -> DraftChain | None:
        """Whole drafts in one call; None where this runner has to run the layer for every token."""

    def seen_rows(self) -> list[Tensor]:
        """Of the step that ran last, what the layers gave that the model's head reads, (T, H) each."""

    def run_predictor(self, x_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T_co]:
        """What that layer gives for rows that it changes in place, (T, H). Of a row without a sum from the experts it
        is not finite. The first `decodes` rows are no prompt's. Between two steps of the micro-batch."""
