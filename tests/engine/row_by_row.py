"""What the sampler must give, row by row and token by token in Python's own numbers: slow, and easy to believe."""

import math
from collections.abc import Sequence as Many

from afserve.engine.draws import drawn_number
from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.scheduling.sequence import Sequence


def edited(row: Many[float], sequence: Sequence) -> list[float]:
    """Logits with penalties and biases, and without the tokens that `min_tokens` holds back."""
    params, found = sequence.request.params, list(row)
    for token in set(sequence.tokens):
        factor = params.repetition_penalty
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token in set(sequence.output_ids):
        found[token] -= params.presence_penalty
        found[token] -= params.frequency_penalty * sequence.output_ids.count(token)
    for token, bias in params.logit_bias:
        found[token] += bias
    if sequence.output_length < params.min_tokens:
        for token in (*sequence.eos_ids, *params.stop_token_ids):
            found[token] = -math.inf
    return found


def kept(logits: Many[float], params: SamplingParams) -> list[float]:
    """What each token weighs, the best one 1; 0 where it is cut off."""
    best = max(logits)
    weights = [math.exp((one - best) / params.temperature) for one in logits]
    if params.top_k > 0:
        least = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [one if one >= least else 0.0 for one in weights]
    total, before, least = sum(weights), 0.0, 1.0
    for one in sorted(weights, reverse=True):
        if before < params.top_p * total:
            least = one
        before += one
    return [one if one >= max(least, params.min_p) else 0.0 for one in weights]


def token_of(row: Many[float], sequence: Sequence) -> int:
    """The one that is drawn at the sequence's position, without a grammar."""
    params, logits = sequence.request.params, edited(row, sequence)
    if params.greedy or params.top_k == 1:
        return logits.index(max(logits))
    weights = kept(logits, params)
    assert params.seed is not None
    point = drawn_number(params.seed, sequence.output_length, False) * sum(weights)
    for token, one in enumerate(weights):
        point -= one
        if point < 0:
            return token
    return max(token for token, one in enumerate(weights) if one > 0)
