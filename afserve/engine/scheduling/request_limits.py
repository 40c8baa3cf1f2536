"""Which requests a node can compute at all: by their lengths, token ids and what they ask for. Integers only."""

from dataclasses import dataclass

from afserve.engine.scheduling.request import GenerationRequest
from afserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Tokens of one request that the model takes, tokens that the node's KV cache holds, and the number of token
    ids."""

    model_length: int
    capacity: int
    vocabulary: int

    @property
    def longest(self) -> int:
        """A sequence ends with so many tokens."""
        return min(self.model_length, self.capacity)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError."""
        length, limit = len(request.prompt_ids) + len(request.generated), self.model_length
        what = "the prompt and what was generated have" if request.generated else "the prompt has"
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        if length >= limit:
            raise RequestError(
                f"{what} {length} tokens; at most {limit - 1} fit with one new token (max_model_len {limit})",
                param="prompt",
            )
        self._check_ids(request)
        if len(request.generated) >= request.params.max_tokens:
            raise RequestError(
                f"generated: {len(request.generated)} tokens are there and max_tokens is {request.params.max_tokens}: "
                "the request has ended already",
                param="generated",
            )
        if request.params.seed is None and not request.params.greedy:
            raise RequestError(
                "seed: a request that draws tokens needs one; SamplingParams.choices() gives it", param="seed"
            )
        if length >= self.capacity:
            raise RequestError(
                f"{what} {length} tokens, the KV cache of a node holds {self.capacity}", param="prompt"
            )

    def _check_ids(self, request: GenerationRequest) -> None:
        limit = self.vocabulary
        named = {
            "prompt": request.prompt_ids,
            "generated": request.generated,
            "prediction": request.prediction,
        }
        for name, ids in named.items():
            worst = next((t for t in ids if not 0 <= t < limit), None)
            if worst is not None:
                raise RequestError(f"{name} token id {worst} is outside [0, {limit})", param=name)
        for token in (*request.params.stop_token_ids, *(t for t, _ in request.params.logit_bias)):
            if not 0 <= token < limit:
                raise RequestError(f"token id {token} is outside [0, {limit})", param="stop_token_ids")
