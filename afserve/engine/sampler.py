"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeded draws, log-probabilities.

A row's outcome depends on its own logits, parameters, history and position only, never on its neighbours, so
any batching gives the same tokens. Shapes: R rows, V vocabulary.
"""

import logging
import random
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.engine.guides import Guide
from afserve.engine.request import NOT_FINITE, SamplingParams, TokenLogprob
from afserve.engine.sequence import Sequence
from afserve.errors import RequestError
from afserve.kernels.ops import Ops

NEVER = float("-inf")
LEAST_LOGPROB = -9999.0  # what OpenAI and vLLM say of a token that cannot come; JSON has no -Infinity
NUCLEUS = (
    1024  # top-p and min-p look at so many best tokens first: 0.7 ms of 129,280, where sorting all takes 12
)

_ROWS = 64  # of a prompt's logits at once: 64 of 129,280 are 33 MB in float32

_NONE_LEFT = "min_tokens: every token that may come next is a stop token, so none can be held back"
_SECOND = 1 << 90  # beyond the bits of any seed and position: another draw at the same position

log = logging.getLogger("afserve.engine")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence got no token; it ends with this message, its neighbours do not notice."""

    message: str


def sample(logits_RV: Tensor, sequences: Many[Sequence], ops: Ops) -> list[int | Failure]:
    """One token or failure per row; logits are not changed. All-greedy batches take the short way.

    A row with a logit that is not finite has no token: nothing drawn from it would mean anything. Rows that are not
    plainly greedy are drawn from on the host, all of them brought there at once.
    """
    found: list[int | Failure] = [
        Failure(NOT_FINITE.format(where="the final norm or the LM head")) if token < 0 else token
        for token in ops.argmax(logits_RV).tolist()
    ]
    drawn = [
        row
        for row, (token, sequence) in enumerate(zip(found, sequences, strict=True))
        if isinstance(token, int)
        and not (_plain(sequence) and (sequence.guide is None or _allowed(sequence.guide, sequence, token)))
    ]
    if drawn:
        for row, row_V in zip(drawn, rows_of(logits_RV, drawn).cpu().double(), strict=True):
            found[row] = _guarded(row_V, sequences[row])
    return found


def rows_of(x_RV: Tensor, rows: list[int]) -> Tensor:
    """A copy of these rows, where they lie."""
    return x_RV.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x_RV.device))


def _guarded(row_V: Tensor, sequence: Sequence) -> int | Failure:
    """Whatever goes wrong with one row, the rows beside it get their tokens."""
    try:
        return _one(row_V, sequence)
    except RequestError as error:
        return Failure(error.message)
    except Exception as error:  # the request ends with it, and the log has the rest
        log.exception("request %d: sampling failed", sequence.request.handle)
        return Failure(
            f"sampling failed for this request ({type(error).__name__}); the node's log has the reason"
        )


def _plain(sequence: Sequence) -> bool:
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
    assert seed is not None, "the scheduler takes no request that draws without a seed"
    return _draw(row_V, params, seed)


def _guided(row_V: Tensor, sequence: Sequence, guide: Guide) -> int:
    """A draw from the whole vocabulary where the grammar allows it, else another one from what the grammar allows: both
    together are a draw from what it allows, and the first needs no mask. Not so where the best few are cut out first.
    """
    params, seed, at = sequence.request.params, _seed(sequence), sequence.prompt_length
    if params.greedy or (params.top_p == 1.0 and params.top_k <= 0 and params.min_p == 0.0):
        token = _choose(row_V, params, seed)
        if guide.allows(sequence.tokens, at, token):
            return token
    row_V.masked_fill_(torch.from_numpy(guide.forbidden_V(sequence.tokens, at)), NEVER)
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
    cumulative = torch.where(keep, probability, 0.0).cumsum(-1)
    point = random.Random(seed).random() * float(cumulative[-1])
    last = int((cumulative < cumulative[-1]).sum())  # the last token that has any probability
    index = min(int(torch.searchsorted(cumulative, point, right=True)), last)
    return index if token is None else int(token[index])


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
    """A draw is a function of (seed, position), so preemption and re-batching cannot change it."""
    seed = sequence.request.params.seed
    return None if seed is None else (seed << 24) ^ sequence.output_length


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
