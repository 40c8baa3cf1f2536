"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeded draws, log-probabilities.

A row's outcome depends on its own logits, parameters, history and position only, never on its neighbours, so
any batching gives the same tokens. Shapes: R rows, V vocabulary.
"""

import random
from collections import Counter
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from afserve.engine.request import SamplingParams, TokenLogprob
from afserve.engine.sequence import Sequence
from afserve.kernels.ops import Ops

NEVER = float("-inf")


def sample(logits_RV: Tensor, sequences: Many[Sequence], ops: Ops) -> list[int]:
    """One token per row; logits are not changed. All-greedy batches take the short way."""
    if all(_plain(s) for s in sequences):
        return ops.argmax(logits_RV).tolist()
    return [_one(row_V.clone(), sequence) for row_V, sequence in zip(logits_RV, sequences, strict=True)]


def _plain(sequence: Sequence) -> bool:
    p = sequence.request.params
    untouched = p.repetition_penalty == 1.0 and not (
        p.presence_penalty or p.frequency_penalty or p.logit_bias
    )
    return p.greedy and untouched and sequence.output_length >= p.min_tokens


def _one(row_V: Tensor, sequence: Sequence) -> int:
    params = sequence.request.params
    _penalise(row_V, sequence, params)
    for token, bias in params.logit_bias:
        row_V[token] += bias
    if sequence.output_length < params.min_tokens:
        _forbid(row_V, sequence)
    if params.greedy:
        return int(row_V.argmax())
    return _draw(row_V / params.temperature, params, _seed(sequence))


def _forbid(row_V: Tensor, sequence: Sequence) -> None:
    """Hold back every token that would stop before min_tokens."""
    for token in (*sequence.eos_ids, *sequence.request.params.stop_token_ids):
        if token < row_V.shape[0]:
            row_V[token] = NEVER


def _penalise(row_V: Tensor, sequence: Sequence, params: SamplingParams) -> None:
    """Repetition (CTRL, arXiv 1909.05858) over prompt and output; presence and frequency over the output."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row_V.device)
        value = row_V[seen]
        factor = params.repetition_penalty
        row_V[seen] = torch.where(value > 0, value / factor, value * factor)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(sequence.output_ids)
        if counts:
            ids = torch.tensor(list(counts), device=row_V.device)
            times = torch.tensor(list(counts.values()), dtype=row_V.dtype, device=row_V.device)
            row_V[ids] -= params.presence_penalty + params.frequency_penalty * times


def _draw(row_V: Tensor, params: SamplingParams, seed: int) -> int:
    """top-k, then top-p, then min-p over what remains; one uniform number decides."""
    value, token = row_V.sort(descending=True, stable=True)
    if params.top_k > 0:
        value, token = value[: params.top_k], token[: params.top_k]
    probability = value.softmax(-1)
    keep = torch.ones_like(probability, dtype=torch.bool)
    if params.top_p < 1.0:
        keep &= probability.cumsum(-1) - probability < params.top_p
    if params.min_p > 0.0:
        keep &= probability >= params.min_p * probability[0]
    kept = torch.where(keep, probability, 0.0).double()
    cumulative = kept.cumsum(-1)
    point = random.Random(seed).random() * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, point, right=True))
    return int(token[min(index, int(keep.nonzero()[-1]))])


def _seed(sequence: Sequence) -> int:
    """A draw is a function of (seed, position), so preemption and re-batching cannot change it."""
    seed = sequence.request.params.seed
    base = seed if seed is not None else int.from_bytes(sequence.request.request_id.encode()[-24:], "little")
    return (base << 24) ^ sequence.output_length


def logprobs_of(row_V: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """From raw logits, before temperature and penalties, as the OpenAI API and vLLM report them."""
    logprob_V = row_V.float().log_softmax(-1)
    chosen = float(logprob_V[token])
    rank = int((logprob_V > logprob_V[token]).sum()) + 1
    value, index = (
        logprob_V.topk(min(alternatives, logprob_V.shape[0])) if alternatives else (logprob_V[:0],) * 2
    )
    top = tuple((int(i), float(v)) for i, v in zip(index.tolist(), value.tolist(), strict=True))
    return TokenLogprob(token, chosen, rank, top)
