"""Which requests a node can compute at all: by their lengths, token ids and what they ask for. Integers only."""

from dataclasses import dataclass

from afserve.engine.scheduling.request import GenerationRequest
from afserve.errors import OverloadedError, RequestError
from afserve.tiles import MOST_TILE_BYTES, EncoderSpec

MOST_HELD = 1 << 30  # bytes of tiles of a node's open requests: a small file may hold a large picture


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Tokens of one request that the model takes, tokens that the node's KV cache holds, the number of token ids, and
    what the model encodes pictures with."""

    model_length: int
    capacity: int
    vocabulary: int
    encoder: EncoderSpec | None = None

    @property
    def longest(self) -> int:
        """A sequence ends with so many tokens."""
        return min(self.model_length, self.capacity)

    def check(self, request: GenerationRequest, held: int = 0) -> None:
        """Raises RequestError, or OverloadedError. Open requests have `held` bytes of tiles."""
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
        if request.tiles:
            self._check_tiles(request, held)
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

    def _check_tiles(self, request: GenerationRequest, held: int) -> None:
        """One begins within the prompt, which may end in the middle of its rows."""
        if self.encoder is None:
            raise RequestError(
                "tiles: this model has no encoder of pictures, it reads text only", param="tiles"
            )
        end, prompt = 0, request.prompt_ids
        for tile in request.tiles:
            if why := self.encoder.fault(tile):
                raise RequestError(f"tiles: one {why}", param="tiles")
            rows = self.encoder.row_count(tile)
            place = prompt[tile.start : tile.start + rows]
            if tile.start < end or not place or set(place) != {self.encoder.token}:
                raise RequestError(
                    f"tiles: the {rows} tokens from {tile.start} on are not {self.encoder.token} all, or another "
                    "tile's",
                    param="tiles",
                )
            end = tile.start + rows
        own = sum(len(tile.pixels) for tile in request.tiles)
        if own > MOST_TILE_BYTES:
            raise RequestError(f"tiles: {own} bytes, at most {MOST_TILE_BYTES} are taken", param="tiles")
        if held + own > MOST_HELD:
            raise OverloadedError(
                f"{held} bytes of pictures are open, at most {MOST_HELD} are held; try again later"
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
