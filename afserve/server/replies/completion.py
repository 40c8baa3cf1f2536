"""What `LLM.generate` returns."""

from dataclasses import dataclass

from afserve.engine.scheduling.request import FinishReason, TokenLogprob
from afserve.engine.scheduling.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated continuation; `index` counts the n of one prompt.

    `routed_experts`, where they were asked for: of the n tokens that prompt and answer have, those of the first n - 1.
    With the finish_reason "error" the model's numbers failed for it, `error` says where; other continuations go on.
    """

    prompt_ids: tuple[int, ...]
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str | None = None
    routed_experts: RoutedExperts | None = None
