"""The tokens of one model's prompts: what a client sent as text or as ids, checked, and the room that they leave."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.scheduling.routed_experts import check_size
from afserve.errors import RequestError, shown
from afserve.server.bodies.openai import CompletionRequest, Prompt
from afserve.server.bodies.prepared import ContextLengthError, EchoText
from afserve.tokens.detokenizer import text_up_to
from afserve.tokens.tokenizer import Tokenizer

# Texts with more characters than this per token of context are counted in pieces first.
SCREENED_CHARACTERS = 4
# From so many the tokens of such a text are estimated.
SAMPLED_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class TextModel:
    """What preparing must know of the model and of the limits. `folder` holds tokenizer and chat template; `strict`
    refuses wishes that the model cannot follow. `drafts`: its nodes verify what is guessed. A token's experts are
    `routed_bytes`. `changing_lines` are names of lines that do not enter prompts."""

    folder: str
    name: str
    max_model_len: int
    vocab_size: int
    max_sequences: int
    aliases: Sequence[str] = ()
    strict: bool = False
    drafts: bool = False
    routed_bytes: int = 0
    changing_lines: Sequence[str] = ()


class Elsewhere(Exception):
    """A template or a grammar is asked for where none is rendered or compiled."""


class PromptTokens:
    """With `elsewhere` a tokenizer that may take without end is asked in another process."""

    def __init__(self, model: TextModel, tokenizer: Tokenizer, *, elsewhere: bool) -> None:
        self._model, self._tokenizer, self._elsewhere = model, tokenizer, elsewhere
        self._size = model.max_model_len

    def ids(self, prompt: Prompt, add_special_tokens: bool, param: str) -> "array[int]":
        """As 32-bit integers. Raises RequestError that names `param`, also where they are more than the context has."""
        if isinstance(prompt, str):
            self.check_quick()
            self._screen(prompt, param)
            try:
                return array("i", self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
            except RequestError as error:
                raise RequestError.about(param, f"{error.message}") from error
        top, limit = self._model.vocab_size, self._model.max_model_len
        if len(prompt) > limit:
            self.tokens_left(len(prompt), None, None, param)
        if prompt and not 0 <= min(prompt) <= max(prompt) < top:
            at, token_id = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < top)
            raise RequestError.about(
                param, f"token id {shown(token_id)} at position {at} is outside [0, {top - 1}]"
            )
        return array("i", prompt)

    def expected(self, text: str) -> "array[int]":
        """The beginning of what somebody expects as an answer, no more than the context has."""
        return self.ids(text[: SCREENED_CHARACTERS * self._size], False, "prediction")[: self._size]

    def check_quick(self) -> None:
        """A tokenizer that may take without end is asked where there are limits."""
        if self._elsewhere and not self._tokenizer.is_quick:
            raise Elsewhere

    def echo(self, asked: CompletionRequest, prompts: Sequence["array[int]"]) -> EchoText:
        """The words of prompts that an answer repeats, whose ids are `prompts`."""
        self.check_quick()
        texts, added = [], []
        for prompt, ids in zip(asked.prompts, prompts, strict=True):
            if isinstance(prompt, str):
                texts.append(prompt)
            elif asked.wanted_tokens == 0:
                texts.append(self._tokenizer.decode(ids, skip_special_tokens=False))
            else:  # a last character that is cut is told with what follows
                texts.append(text_up_to(self._tokenizer, ids))
            bos = isinstance(prompt, str) and ids[0] in self._tokenizer.special_ids
            added.append(int(bos and not texts[-1].startswith(self._tokenizer.token(ids[0]))))
        return EchoText(tuple(texts), tuple(added), generate=asked.wanted_tokens != 0)

    def check_named(self, params: SamplingParams) -> None:
        """Raises RequestError for an id that these name and the vocabulary has not."""
        top = self._model.vocab_size
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(token_id for token_id, _ in params.logit_bias)),
        ):
            for token_id in ids:
                if not 0 <= token_id < top:
                    raise RequestError.about(name, f"token id {shown(token_id)} is outside [0, {top - 1}]")

    def check_routed(self, prompts: Sequence["array[int]"], params: SamplingParams) -> None:
        """Raises RequestError where the experts of all choices are more than a request gets."""
        if params.return_routed_experts:
            tokens = params.n * sum(len(prompt) + params.max_tokens for prompt in prompts)
            check_size(tokens, self._model.routed_bytes)

    @property
    def _words(self) -> str:
        """OpenAI's, from which clients read the number."""
        return f" (this model's maximum context length is {self._size} tokens)"

    def _screen(self, text: str, param: str) -> None:
        """Refuses a text that is far too long before its encoding, many times its size, is built."""
        size = self._size
        if len(text) > SCREENED_CHARACTERS * size and self._tokenizer.surely_longer(text, size):
            sample = len(self._tokenizer.encode(text[:SAMPLED_CHARACTERS], add_special_tokens=False))
            raise ContextLengthError(
                f"{param}: {len(text)} characters are more tokens than the model's context of {size}; send fewer"
                f"{self._words}",
                param=param,
                tokens=max(size + 1, sample * len(text) // SAMPLED_CHARACTERS),
            )

    def tokens_left(
        self, count: int, wanted: int | None, default: int | None, param: str, field: str = "max_tokens"
    ) -> int:
        """How many tokens may follow a prompt: those wanted, or the default cut to what the context has left."""
        left = self._size - count
        if not count:
            raise RequestError.about(param, "has no tokens; send at least one")
        if left < 1:
            raise ContextLengthError(
                f"{param}: has {count} tokens, the model's context of {self._size} must hold them and at least one "
                f"more; send a shorter one{self._words}",
                param=param,
                tokens=count,
            )
        if wanted is None:
            return left if default is None else min(default, left)
        if wanted > left:
            raise ContextLengthError(
                f"{field}: {wanted} after a prompt of {count} tokens is over the model's context of {self._size}; "
                f"at most {left} fit{self._words}",
                param=field,
                tokens=count,
                wanted=wanted,
            )
        return wanted
