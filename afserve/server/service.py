"""What every endpoint is given: the backend, the text side, the limits and the counts of one gateway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from afserve.chat_template import ChatTemplate
from afserve.engine.request import SamplingParams
from afserve.errors import CapacityError, NotFoundError, RequestError
from afserve.server.backend import Backend
from afserve.server.body import Bodies
from afserve.server.generation import Generator
from afserve.server.inflight import Inflight
from afserve.server.observe import ServerMetrics
from afserve.server.openai import ChatRequest, Prompt
from afserve.server.refusal import ContextLengthError
from afserve.server.settings import ServerSettings
from afserve.server.text_worker import TextWorker
from afserve.tokenizer import Tokenizer

T = TypeVar("T")
# Prompts shorter than this are tokenized where they are: a thread costs more than it saves.
INLINE_CHARACTERS = 2048
# Texts with more characters than this per token of context are counted in pieces first.
SCREENED_CHARACTERS = 4


@dataclass(frozen=True, slots=True)
class Service:
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate | None
    settings: ServerSettings
    metrics: ServerMetrics
    inflight: Inflight
    bodies: Bodies
    worker: TextWorker
    generator: Generator
    defaults: SamplingParams

    async def read(self, request: Request) -> dict[str, object]:
        async with self.bodies.object(request) as body:
            return body

    def check_model(self, name: str | None) -> None:
        served = self.backend.model.name
        if name is not None and name != served:
            raise NotFoundError(f"model: {name!r} is not served here, {served!r} is", param="model")

    def check_ready(self) -> None:
        if self.inflight.draining or not self.backend.ready():
            raise CapacityError(
                "not ready: nodes are starting, stopping or lost; try again when /ready answers 200"
            )

    async def tokenize(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool, param: str = "prompt"
    ) -> tuple[tuple[int, ...], ...]:
        def work() -> tuple[tuple[int, ...], ...]:
            return tuple(self._ids(prompt, add_special_tokens, param) for prompt in prompts)

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return work() if size < INLINE_CHARACTERS else await self.worker.run(work)

    async def render(self, chat: ChatRequest) -> str:
        """The prompt text of a conversation. Always on a thread: a template is a program."""
        return await self.worker.run(self._renderer(chat))

    def _renderer(self, chat: ChatRequest) -> Callable[[], str]:
        template = self.template
        if template is None:
            raise RequestError(
                "messages: this model has no chat template; use /v1/completions with a prompt",
                param="messages",
            )
        return lambda: template.render(
            chat.messages,
            tools=chat.tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            extra=chat.template_values,
        )

    def _ids(self, prompt: Prompt, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._screen(prompt, param)
            return tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        top = self.backend.model.vocab_size
        if prompt and not 0 <= min(prompt) <= max(prompt) < top:
            at, token_id = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < top)
            raise RequestError(
                f"prompt: token id {token_id} at position {at} is outside [0, {top - 1}]", param="prompt"
            )
        return prompt

    def _screen(self, text: str, param: str) -> None:
        """Refuses a text that is far too long before its encoding, many times its size, is built."""
        limit = self.backend.model.max_model_len
        if len(text) > SCREENED_CHARACTERS * limit and self.tokenizer.surely_longer(text, limit):
            raise ContextLengthError(
                f"{param}: {len(text)} characters are more tokens than the model's context of {limit}; send fewer",
                param=param,
            )

    def room(self, ids: Sequence[int], wanted: int | None, default: int | None, param: str) -> int:
        """How many tokens may follow a prompt: those wanted, or the default cut to what the context has left."""
        limit = self.backend.model.max_model_len
        left = limit - len(ids)
        if not ids:
            raise RequestError(f"{param}: has no tokens; send at least one", param=param)
        if left < 1:
            raise ContextLengthError(
                f"{param}: has {len(ids)} tokens, the model's context of {limit} must hold them and at least one "
                "more; send a shorter one",
                param=param,
            )
        if wanted is None:
            return left if default is None else min(default, left)
        if wanted > left:
            raise ContextLengthError(
                f"max_tokens: {wanted} after a prompt of {len(ids)} tokens is over the model's context of {limit}; "
                f"at most {left} fit",
                param="max_tokens",
            )
        return wanted
