"""The layers that guess behind each step, as the loop runs them: one of multi-token prediction, and an EAGLE-3 head.

Shapes: T rows, S sequences that are drafted for, H hidden.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from afserve.comm.m2n.link_contract import SentTicket
from afserve.engine.step.runner import PredictorRunner, StepRun, T
from afserve.kernels.cache import LayerCache
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import DraftChain
from afserve.models.decoder import AttentionModel
from afserve.models.drafters.eagle import EagleHead

T_co = TypeVar("T_co", bound=SentTicket, covariant=True)


class DraftLayer(Protocol[T_co]):
    @property
    def ops(self) -> Ops: ...

    def chain(self) -> DraftChain | None:
        """Whole drafts in one call; None where it is run for every token."""

    def enter(self, x_TH: Tensor) -> Tensor:
        """What its first pass behind a step begins with; `x_TH` is what the target's last layer gave."""

    def run_pass(self, token_T: Tensor, hidden_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T_co]:
        """What `scores` reads, and its next pass begins with. The first `decodes` rows are no prompt's."""

    def scores(self, hidden_SH: Tensor) -> Tensor:
        """Float32 logits."""

    def target_ids(self, drafted: list[int]) -> list[int]:
        """The model's ids of the columns of `scores`; -1 stays."""


class MtpLayer(Generic[T]):
    """The checkpoint's own, whose experts are where the others are."""

    def __init__(self, model: AttentionModel, runner: PredictorRunner[T]) -> None:
        assert model.predictor is not None, "`served_spec` gives a model its layer, or refuses"
        self._model, self._predictor, self._runner = model, model.predictor, runner
        self.ops, self.chain = model.ops, runner.chain
        self.enter, self.scores = model.normed, model.scores

    def run_pass(self, token_T: Tensor, hidden_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T]:
        x_TH = self._predictor.join(self._model.embed(token_T), hidden_TH)
        x_TH = yield from self._runner.run_predictor(x_TH, paged, decodes)
        return self._predictor.close(x_TH)

    def target_ids(self, drafted: list[int]) -> list[int]:
        return drafted


class EagleLayer(Generic[T]):
    """A head beside the model. It has no experts, so nobody is waited for."""

    def __init__(
        self, head: EagleHead, caches: Sequence[LayerCache], ops: Ops, runner: PredictorRunner[T]
    ) -> None:
        self._head, self._caches, self._runner, self.ops = head, caches, runner, ops
        self.scores, self.target_ids = head.scores, head.target_ids

    def chain(self) -> None:
        """It runs once for every token."""

    def enter(self, x_TH: Tensor) -> Tensor:
        return self._head.fuse(self._runner.seen_rows())

    def run_pass(self, token_T: Tensor, hidden_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T]:
        yield from ()
        return self._head.pass_rows(token_T, hidden_TH, self._caches, self.ops.bind_batch(paged))

    def keep_keys(self, token_T: Tensor, hidden_TH: Tensor, paged: PagedBatch) -> None:
        """Of a first pass the keys and values alone: what later passes read of rows that nothing is drafted behind."""
        self._head.keep_keys(token_T, hidden_TH, self._caches, paged)
