"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeded draws, log-probabilities.

A row's outcome depends on its own logits, parameters, history and position only, never on its neighbours, so
any batching gives the same tokens. Shapes: R rows, V vocabulary.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afserve.engine.scheduling.guides import Guide
from afserve.engine.scheduling.request import NOT_FINITE, SamplingParams, TokenLogprob
from afserve.engine.scheduling.sequence import Sequence
from afserve.errors import RequestError
from afserve.grammars.grammar import forbidden_of
from afserve.kernels.ops import Ops

T = TypeVar("T")
NEVER = float("-inf")
LEAST_LOGPROB = -9999.0  # what OpenAI and vLLM say of a token that cannot come; JSON has no -Infinity
NUCLEUS = (
    1024  # top-p and min-p look at so many best tokens first: 0.7 ms of 129,280, where sorting all takes 12
)

_ROWS = 64  # of a prompt's logits at once: 64 of 129,280 are 33 MB in float32

_NONE_LEFT = "min_tokens: every token that may come next is a stop token, so none can be held back"
_MUCH = 1e-6  # of probability: what is left of it is exact enough to draw from, and need not be computed anew
_SEEDS = 1 << 64
_SECOND = 1 << 90  # beyond the bits of any seed and position: another draw at the same position

log = logging.getLogger("afserve.engine")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence got no token; it ends with this message, its neighbours do not notice."""

    message: str


def sample(
    logits_RV: Tensor, sequences: Many[Sequence], ops: Ops, best_R: Many[int] = ()
) -> list[int | Failure]:
    """One token or failure per row; logits are not changed. All-greedy batches take the short way.

    A row with a logit that is not finite has no token: nothing drawn from it would mean anything. Rows that are not
    plainly greedy are drawn from on the host, all of them brought there at once. Plainly greedy rows whose grammar does
    not take the best token are masked together, where they lie. `best_R`: what `ops.argmax` gives, where it is known.
    """
    found: list[int | Failure] = [
        Failure(NOT_FINITE.format(where="the final norm or the LM head")) if token < 0 else token
        for token in best_R or ops.argmax(logits_RV).tolist()
    ]
    drawn, masked = [], []
    for row, (token, sequence) in enumerate(zip(found, sequences, strict=True)):
        if isinstance(token, Failure):
            continue
        if not plain(sequence):
            drawn.append(row)
        elif sequence.guide is not None and not _allowed(sequence.guide, sequence, token):
            masked.append(row)
    if masked:
        _best_allowed(logits_RV, masked, sequences, found)
    if drawn:
        for row, row_V in zip(drawn, rows_of(logits_RV, drawn).cpu().double(), strict=True):
            found[row] = _guarded(sequences[row], partial(_one, row_V, sequences[row]))
    return found


def _best_allowed(
    logits_RV: Tensor, rows: list[int], sequences: Many[Sequence], found: list[int | Failure]
) -> None:
    """The best token that each row's grammar takes, or why there is none, into `found`."""
    kept, allowed_RB = [], []
    for row in rows:
        bits = _guarded(sequences[row], partial(_allowed_B, sequences[row]))
        if isinstance(bits, Failure):
            found[row] = bits
        else:
            kept.append(row)
            allowed_RB.append(bits)
    if not kept:
        return
    forbidden_RV = torch.from_numpy(forbidden_of(allowed_RB, logits_RV.shape[1])).to(logits_RV.device)
    best = rows_of(logits_RV, kept).masked_fill_(forbidden_RV, NEVER).max(-1)
    for row, value, token in zip(kept, best.values.tolist(), best.indices.tolist(), strict=True):
        found[row] = token if value > NEVER else Failure(_NONE_LEFT)


def _allowed_B(sequence: Sequence) -> NDArray[np.uint8]:
    assert sequence.guide is not None
    return sequence.guide.allowed_B(sequence.tokens, sequence.prompt_length)


def rows_of(x_RV: Tensor, rows: list[int]) -> Tensor:
    """A copy of these rows, where they lie."""
    return x_RV.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x_RV.device))


def _guarded(sequence: Sequence, work: Callable[[], T]) -> T | Failure:
    """Whatever goes wrong with one row, the rows beside it get their tokens."""
    try:
        return work()
    except RequestError as error:
        return Failure(error.message)
    except Exception as error:  # the request ends with it, and the log has the rest
        log.exception("request %d: sampling failed", sequence.request.handle)
        return Failure(
            f"sampling failed for this request ({type(error).__name__}); the node's log has the reason"
        )


def plain(sequence: Sequence) -> bool:
    """Whether it takes the likeliest token, and all later ones, as far as a grammar lets it."""
    p = sequence.request.params
    untouched = p.repetition_penalty == 1.0 and not (
        p.presence_penalty or p.frequency_penalty or p.logit_bias
    )
    return p.greedy and untouched and sequence.output_length >= p.min_tokens


def _allowed(guide: Guide, sequence: Sequence, token: int) -> bool:
    """Whether the grammar takes the best token: then it is the best of those that the grammar takes, and needs no mask.
    Whatever is wrong with a grammar is told where the row is drawn."""
    try:
        return guide.allows(sequence.tokens, sequence.prompt_length, token)
    except Exception:  # noqa: BLE001 - its mask, which is asked for next, raises it again
        return False


def _one(row_V: Tensor, sequence: Sequence) -> int:
    """`row_V` is float64, finite and the callee's own: penalties and biases of float32 logits stay finite in it."""
    params = sequence.request.params
    _penalise(row_V, sequence, params)
    for token, bias in params.logit_bias:
        row_V[token] += bias
    if sequence.output_length < params.min_tokens:
        _forbid(row_V, sequence)
    if sequence.guide is not None:
        return _guided(row_V, sequence, sequence.guide)
    return _choose(row_V, params, _seed(sequence))


def _choose(row_V: Tensor, params: SamplingParams, seed: int | None) -> int:
    if params.greedy:
        return int(row_V.argmax())
    return _draw(row_V, params, _given(seed))


def _given(seed: int | None) -> int:
    assert seed is not None, "the scheduler takes no request that draws without a seed"
    return seed


def _guided(row_V: Tensor, sequence: Sequence, guide: Guide) -> int:
    """A draw from the whole vocabulary where the grammar allows it, else another one from what the grammar allows: both
    together are a draw from what it allows, and the first needs no mask. Not so where the best few are cut out first.
    """
    params, seed, at = sequence.request.params, _seed(sequence), sequence.prompt_length
    probability_V: Tensor | None = None
    token: int | None = None
    if params.greedy:
        token = int(row_V.argmax())
    elif params.top_p == 1.0 and params.top_k <= 0 and params.min_p == 0.0:
        probability_V = _softmax(row_V, params)
        token = _pick(probability_V, _given(seed))
    if token is not None and guide.allows(sequence.tokens, at, token):
        return token
    forbidden_V = torch.from_numpy(forbidden_of([guide.allowed_B(sequence.tokens, at)], len(row_V))[0])
    if probability_V is not None:
        probability_V.masked_fill_(forbidden_V, 0.0)
        if float(probability_V.sum()) > _MUCH:
            return _pick(probability_V, _given(seed) ^ _SECOND)
    row_V.masked_fill_(forbidden_V, NEVER)
    if row_V.max() == NEVER:
        raise RequestError(_NONE_LEFT, param="min_tokens")
    return _choose(row_V, params, None if seed is None else seed ^ _SECOND)


def _forbid(row_V: Tensor, sequence: Sequence) -> None:
    """Hold back every token that would stop before min_tokens. Raises RequestError when that leaves none."""
    for token in (*sequence.eos_ids, *sequence.request.params.stop_token_ids):
        if token < row_V.shape[0]:
            row_V[token] = NEVER
    if row_V.max() == NEVER:
        raise RequestError(_NONE_LEFT, param="min_tokens")


def _penalise(row_V: Tensor, sequence: Sequence, params: SamplingParams) -> None:
    """Repetition (CTRL, arXiv 1909.05858) over prompt and output; presence and frequency over the output."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)))
        value = row_V[seen]
        factor = params.repetition_penalty
        row_V[seen] = torch.where(value > 0, value / factor, value * factor)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(sequence.output_ids)
        if counts:
            ids = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()), dtype=row_V.dtype)
            row_V[ids] -= params.presence_penalty + params.frequency_penalty * times


def _draw(row_V: Tensor, params: SamplingParams, seed: int) -> int:
    """top-k, then top-p, then min-p over what remains; one uniform number decides. The best token is always kept."""
    probability, token = _candidates(row_V, params)
    keep = torch.ones_like(probability, dtype=torch.bool)
    if params.top_p < 1.0:
        keep &= probability.cumsum(-1) - probability < params.top_p
    if params.min_p > 0.0:
        keep &= probability >= params.min_p * probability[0]
    if token is not None:
        keep[0] = True
    index = _pick(torch.where(keep, probability, 0.0), seed)
    return index if token is None else int(token[index])


def _pick(weight: Tensor, seed: int) -> int:
    """An index, as likely as its weight is of their sum."""
    cumulative = weight.cumsum(-1)
    point = random.Random(seed).random() * float(cumulative[-1])
    last = int((cumulative < cumulative[-1]).sum())  # the last token that has any probability
    return min(int(torch.searchsorted(cumulative, point, right=True)), last)


def _candidates(row_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """(probability, token), best first; all in the order of the vocabulary, and no tokens, where none is cut off."""
    if params.top_k > 0:
        value, token = row_V.topk(min(params.top_k, row_V.shape[0]))
        return _softmax(value, params), token
    probability_V = _softmax(row_V, params)
    if params.top_p == 1.0 and params.min_p == 0.0:
        return probability_V, None
    probability, token = probability_V.topk(min(NUCLEUS, row_V.shape[0]))
    nucleus = params.top_p < 1.0 and float(probability.sum()) >= params.top_p
    if nucleus or float(probability[-1]) < params.min_p * float(probability[0]):
        return probability, token
    return probability_V.sort(descending=True, stable=True)


def _softmax(value: Tensor, params: SamplingParams) -> Tensor:
    """The maximum is subtracted before the division, so no temperature overflows."""
    return ((value - value.max()) / params.temperature).softmax(-1)


def _seed(sequence: Sequence) -> int | None:
    """A draw is a function of (seed, position), so preemption and re-batching cannot change it. Of a negative seed its
    64 bits count: Python's generator ignores the sign."""
    seed = sequence.request.params.seed
    return None if seed is None else (seed % _SEEDS << 24) ^ sequence.output_length


def logprobs_of(logits_RV: Tensor, tokens: Many[int], alternatives: int) -> list[TokenLogprob]:
    """One entry per token and the row that gave it, natural log. From raw logits, before temperature and penalties, as
    the OpenAI API and vLLM report them. Finite, whatever the logits were. The host waits once for 64 rows."""
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), _ROWS):
        ids = tokens[start : start + _ROWS]
        logprob_RV = logits_RV[start : start + len(ids)].float().log_softmax(-1)
        chosen_R1 = logprob_RV.gather(1, torch.tensor(ids, device=logprob_RV.device)[:, None])
        rank_R = (logprob_RV > chosen_R1).sum(-1) + 1
        value_RA, index_RA = logprob_RV.topk(min(alternatives, logprob_RV.shape[1]))
        columns = (t.tolist() for t in (chosen_R1[:, 0], rank_R, index_RA, value_RA))
        for token, chosen, rank, best, values in zip(ids, *columns, strict=True):
            top = tuple((i, _told(v)) for i, v in zip(best, values, strict=True))
            found.append(TokenLogprob(token, _told(chosen), rank, top))
    return found


def _told(logprob: float) -> float:
    """Above the least, and NaN as the least: JSON has neither -Infinity nor NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
