"""Which experts the tokens of an answer chose, as bytes, for whoever trains with the same choices. No torch.

Of a prompt with P tokens and an answer with A there are P + A - 1 rows: one for each token that was computed, and the
last one was not.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace

from afserve.errors import RequestError
from afserve.spec import ModelSpec

FIELD = "return_routed_experts"
MOST_BYTES = 32 << 20
"""Of one request, all of its choices together."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Tokens one behind the other; of each, for every MoE layer, the `top_k` experts of its router, in its order. They
    are little-endian unsigned integers of `width` bytes. Raises ValueError where `data` is not whole tokens."""

    layers: int
    top_k: int
    width: int
    data: bytes

    def __post_init__(self) -> None:
        fits = self.width in (1, 2, 4) and self.layers > 0 and self.top_k > 0
        if not fits or len(self.data) % self.row_bytes:
            raise ValueError(
                f"routed experts: {len(self.data)} bytes are no tokens of {self.layers} x {self.top_k} x {self.width}"
            )

    @property
    def row_bytes(self) -> int:
        return self.layers * self.top_k * self.width

    @property
    def tokens(self) -> int:
        return len(self.data) // self.row_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.tokens, self.layers, self.top_k

    @property
    def dtype(self) -> str:
        """numpy's name of it: uint8, uint16 or uint32."""
        return f"uint{8 * self.width}"

    def first(self, tokens: int) -> "RoutedExperts":
        return replace(self, data=self.data[: tokens * self.row_bytes])

    def last(self, tokens: int) -> "RoutedExperts":
        return replace(self, data=self.data[max(0, self.tokens - tokens) * self.row_bytes :])

    def as_json(self) -> dict[str, object]:
        return {"data": base64.b64encode(self.data).decode(), "dtype": self.dtype, "shape": list(self.shape)}


def joined(parts: Iterable[RoutedExperts]) -> RoutedExperts | None:
    """One behind the other, of one model; None where there are none."""
    found = list(parts)
    if len(found) < 2:
        return found[0] if found else None
    return replace(found[0], data=b"".join(part.data for part in found))


def width_of(experts: int) -> int:
    """Bytes of an expert's number."""
    return 1 if experts <= 1 << 8 else 2 if experts <= 1 << 16 else 4


def row_bytes_of(spec: ModelSpec) -> int:
    """Of one token, in the layers of the model itself."""
    return (spec.moe_layers - spec.routed_predictors) * spec.top_k * width_of(spec.choices)


def check_size(tokens: int, row_bytes: int) -> None:
    """Raises RequestError where so many tokens, which may come, take more than MOST_BYTES."""
    if tokens * row_bytes > MOST_BYTES:
        raise RequestError(
            f"{FIELD}: {tokens} tokens of {row_bytes} bytes may be more than the {MOST_BYTES >> 20} MiB that a request "
            "gets; ask for fewer tokens (max_tokens) or choices (n), or in several requests",
            param=FIELD,
        )
