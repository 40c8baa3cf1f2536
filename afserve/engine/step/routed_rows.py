"""The experts that the tokens of a step chose, for the sequences that want to know them.

Shapes: T tokens of the step, N of one sequence, K top-k, L MoE layers.
"""

from collections.abc import Container

from torch import Tensor

from afserve.engine.scheduling.routed_experts import RoutedExperts, joined, width_of
from afserve.engine.scheduling.sequence import Sequence as Tokens
from afserve.engine.scheduling.step_plan import StepPlan

_WORDS = {1: "u1", 2: "<u2", 4: "<u4"}


def note_routed(plan: StepPlan, failed: Container[int], expert_LTK: Tensor, experts: int) -> None:
    """Of each chunk of a booked step that did not fail, by its index, the tokens that were confirmed. What a sequence
    knows already was computed once more."""
    first = 0
    for index, chunk in enumerate(plan.chunks):
        sequence, begin, end = chunk.sequence, chunk.sequence.routed_end, chunk.sequence.computed
        if sequence.wants_routed and index not in failed and begin < end:
            at = first + begin - chunk.start
            assert at >= first, "tokens were passed over"
            sequence.routed.append(_of_rows(expert_LTK, slice(at, first + end - chunk.start), experts))
            sequence.routed_end = end
        first += chunk.count


def take_routed(sequence: Tokens) -> RoutedExperts | None:
    """What was not told yet; from now on it was."""
    found = joined(sequence.routed)
    sequence.routed.clear()
    return found


def _of_rows(expert_LTK: Tensor, rows: slice, experts: int) -> RoutedExperts:
    expert_NLK = expert_LTK[:, rows].transpose(0, 1).contiguous().cpu()
    width, (_, layers, top_k) = width_of(experts), expert_NLK.shape
    return RoutedExperts(layers, top_k, width, expert_NLK.numpy().astype(_WORDS[width]).tobytes())
