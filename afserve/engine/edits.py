"""What a sequence's parameters change of its logits before a token is drawn: penalties, biases, stops held back."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from afserve.engine.draws import NEVER
from afserve.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Edits:
    """Logits of `scaled` tokens are divided by `factor`, or times it where they are negative; then `added` counts."""

    scaled: Many[int] = ()
    factor: float = 1.0
    added: Mapping[int, float] = field(default_factory=dict)


NO_EDITS = Edits()


def edits_of(sequence: Sequence, vocabulary: int) -> Edits:
    """Repetition (CTRL, arXiv 1909.05858) over prompt and output; presence and frequency over the output. Before
    `min_tokens` no token that would stop may come. Raises IndexError for a token outside the vocabulary."""
    params, added = sequence.request.params, dict[int, float]()
    scaled = list(set(sequence.tokens)) if params.repetition_penalty != 1.0 else []
    if params.presence_penalty or params.frequency_penalty:
        for token, times in Counter(sequence.output_ids).items():
            added[token] = -(params.presence_penalty + params.frequency_penalty * times)
    for token, bias in params.logit_bias:
        added[token] = added.get(token, 0.0) + bias
    if sequence.output_length < params.min_tokens:
        stops = (*sequence.eos_ids, *params.stop_token_ids)
        added |= {token: NEVER for token in stops if token < vocabulary}
    if not scaled and not added:
        return NO_EDITS
    if max((*scaled, *added)) >= vocabulary:
        raise IndexError(f"a token outside the vocabulary of {vocabulary}")
    return Edits(scaled, params.repetition_penalty, added)
