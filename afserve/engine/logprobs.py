"""Log-probabilities of tokens, as the OpenAI API and vLLM report them. Shapes: R rows, V vocabulary, A alternatives."""

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from afserve.engine.scheduling.request import MAX_LOGPROBS, TokenLogprob
from afserve.engine.step.host_reader import Reads
from afserve.engine.step.step_buffers import StepBuffers

LEAST_LOGPROB = -9999.0  # what OpenAI and vLLM say of a token that cannot come; JSON has no -Infinity
_ROWS = 64  # at once: 64 of 129,280 logits are 33 MB in float32


def logprobs_of(
    logits_RV: Tensor, rows: Many[int], tokens: Many[int], alternatives: Many[int], buffers: StepBuffers
) -> Reads[list[TokenLogprob]]:
    """One entry for each token and the row that gave it, natural log, with so many `alternatives`. From raw logits,
    before temperature and penalties. Finite, whatever the logits were. They are read once."""
    if not tokens:
        return []
    row_R, chosen_R = buffers.write("logprobs", len(tokens), torch.int64, [rows, tokens])
    pieces = zip(row_R.split(_ROWS), chosen_R[:, None].split(_ROWS), strict=True)
    told_RN = torch.cat([_piece(logits_RV.index_select(0, row), chosen) for row, chosen in pieces])
    bits = yield told_RN.view(torch.int64).flatten()
    most, found = min(MAX_LOGPROBS, logits_RV.shape[1]), list[TokenLogprob]()
    numbers = np.array(bits, np.int64).view(np.float64).reshape(told_RN.shape).tolist()
    for token, count, (chosen, rank, *best) in zip(tokens, alternatives, numbers, strict=True):
        pairs = zip(best[:most][:count], best[most:], strict=False)
        top = tuple((int(i), _told(v)) for i, v in pairs)
        found.append(TokenLogprob(token, _told(chosen), int(rank), top))
    return found


def _piece(logits_RV: Tensor, chosen_R1: Tensor) -> Tensor:
    """For each row its token's log-probability and rank, the best tokens and theirs: always as many, so that which of
    equal ones are told does not depend on what others want to know. float64 holds ids and float32 alike."""
    logprob_RV = logits_RV.float().log_softmax(-1)
    chosen_R1 = logprob_RV.gather(1, chosen_R1)
    rank_R1 = (logprob_RV > chosen_R1).sum(-1, keepdim=True) + 1
    best_RA, token_RA = logprob_RV.topk(min(MAX_LOGPROBS, logprob_RV.shape[1]))
    return torch.cat([column.double() for column in (chosen_R1, rank_R1, token_RA, best_RA)], 1)


def _told(logprob: float) -> float:
    """Above the least, and NaN as the least: JSON has neither -Infinity nor NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
