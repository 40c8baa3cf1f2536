"""How much of a model's context a prompt takes, and what it leaves: counts in, a number or a refusal out."""

from dataclasses import dataclass

from afserve.errors import RequestError
from afserve.server.bodies.prepared import ContextLengthError
from afserve.tokens.tokenizer import Tokenizer

# Texts with more characters than this per token of context are counted in pieces first.
SCREENED_CHARACTERS = 4
# From so many the tokens of such a text are estimated.
SAMPLED_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Context:
    """Of `size` tokens."""

    size: int
    tokenizer: Tokenizer

    @property
    def _words(self) -> str:
        """OpenAI's, from which clients read the number."""
        return f" (this model's maximum context length is {self.size} tokens)"

    def screen(self, text: str, param: str) -> None:
        """Refuses a text that is far too long before its encoding, many times its size, is built."""
        size = self.size
        if len(text) > SCREENED_CHARACTERS * size and self.tokenizer.surely_longer(text, size):
            sample = len(self.tokenizer.encode(text[:SAMPLED_CHARACTERS], add_special_tokens=False))
            raise ContextLengthError(
                f"{param}: {len(text)} characters are more tokens than the model's context of {size}; send fewer"
                f"{self._words}",
                param=param,
                tokens=max(size + 1, sample * len(text) // SAMPLED_CHARACTERS),
            )

    def room(
        self, count: int, wanted: int | None, default: int | None, param: str, field: str = "max_tokens"
    ) -> int:
        """How many tokens may follow a prompt: those wanted, or the default cut to what the context has left."""
        left = self.size - count
        if not count:
            raise RequestError(f"{param}: has no tokens; send at least one", param=param)
        if left < 1:
            raise ContextLengthError(
                f"{param}: has {count} tokens, the model's context of {self.size} must hold them and at least one "
                f"more; send a shorter one{self._words}",
                param=param,
                tokens=count,
            )
        if wanted is None:
            return left if default is None else min(default, left)
        if wanted > left:
            raise ContextLengthError(
                f"{field}: {wanted} after a prompt of {count} tokens is over the model's context of {self.size}; "
                f"at most {left} fit{self._words}",
                param=field,
                tokens=count,
                wanted=wanted,
            )
        return wanted
