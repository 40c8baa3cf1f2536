"""What is asked of the engine and what it says back: plain values, no tensors, no torch.

A `GenerationRequest` is one sequence to extend; `n > 1` becomes several requests above the engine.
"""

from dataclasses import dataclass, field
from typing import Literal

from afserve.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Ranges follow the OpenAI API, then vLLM for what OpenAI lacks.

    temperature 0 is greedy. top_k 0 or -1 is off. `min_tokens` holds back every stop condition.
    `logprobs`: number of alternatives per sampled token (0 = only the sampled one), None = off.
    `prompt_logprobs`: the same for prompt tokens.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _range("max_tokens", self.max_tokens, 1, 1 << 24)
        _range("temperature", self.temperature, 0.0, 100.0)
        _range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _range("top_k", self.top_k, -1, 1 << 24)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _range("n", self.n, 1, 128)
        if self.seed is not None:
            _range("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _range(name, value, 0, MAX_LOGPROBS)
        if any(not s for s in self.stop):
            raise RequestError("stop: an empty stop string would stop at once; remove it", param="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # `not (a <= b)` also refuses NaN.
    below = value <= low if open_low else not value >= low
    if below or not value <= high:
        bracket = "(" if open_low else "["
        raise RequestError(f"{name}: {value} is outside {bracket}{low}, {high}]", param=name)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to extend. `stop` strings are handled where text is, above the engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of the best alternatives at its position, natural log."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request. `finish_reason` is set on the last event, `error` only with "error".

    `cached_tokens` and `prompt_logprobs` come with the first event.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    error: str | None = None

    def named(self, request_id: str) -> "TokenEvent":
        """The same under another id; a tenth of the time of dataclasses.replace, once per token."""
        return TokenEvent(
            request_id, self.token_ids, self.finish_reason, self.stop_token_id, self.logprobs, self.prompt_logprobs,
            self.cached_tokens, self.error,
        )  # fmt: skip
