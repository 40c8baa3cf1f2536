"""Which tokens of a draft the target's own step confirms. Shapes: N rows of one sequence, V vocabulary.

Each row is drawn as a step without a draft would draw it, with the confirmed tokens before it and no others: seeds,
penalties, min_tokens and grammars see what they would have seen.
"""

from collections.abc import Sequence as Many

from torch import Tensor

from afserve.engine.sampler import Failure, plain, sample
from afserve.engine.scheduling.sequence import Sequence
from afserve.kernels.ops import Ops


def confirm_draft(
    first: int, draft: Many[int], logits_NV: Tensor, sequence: Sequence, ops: Ops, best_N: Many[int] = ()
) -> tuple[int, ...]:
    """`first` was drawn from row 0; row n stands behind `draft[:n]`. One token more than of the draft is right, or as
    many where the next row gives no token: the step that computes it again says why. `best_N`: the likeliest token of
    each row, below 0 where there is none, which a plainly greedy sequence takes."""
    run = [first]
    if best_N and sequence.guide is None and plain(sequence):
        for guess, best in zip(draft, best_N[1:], strict=True):
            if run[-1] != guess or best < 0:
                break
            run.append(best)
        return tuple(run)
    for row, guess in enumerate(draft, 1):
        if run[-1] != guess:
            break
        (token,) = sample(logits_NV[row : row + 1], [sequence.supposing(run)], ops)
        if isinstance(token, Failure):
            break
        run.append(token)
    return tuple(run)
