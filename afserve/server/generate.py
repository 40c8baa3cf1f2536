"""POST /v1/completions and POST /v1/chat/completions: from a parsed request to an Answer."""

import time
import uuid
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from afserve.engine.request import SamplingParams
from afserve.errors import RequestError
from afserve.server.answer import Answer
from afserve.server.fields import Fields
from afserve.server.generation import Task
from afserve.server.openai import ChatRequest, CompletionRequest, chat_request, completion_request
from afserve.server.replies import ChatReply, CompletionReply, Echo, Header, Reply
from afserve.server.sampling import sampling_params
from afserve.server.service import Service

DEFAULT_COMPLETION_TOKENS = 16


class Generate:
    """The two endpoints that make text."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        async with self._service.bodies.object(request) as body:
            return await self._complete(body)

    async def chat(self, request: Request) -> Response:
        async with self._service.bodies.object(request) as body:
            return await self._chat(body)

    async def _complete(self, body: Mapping[str, object]) -> Response:
        arrived = self._service.metrics.clock.now()
        asked = completion_request(body)
        self._service.check_model(asked.model)
        self._service.check_ready()
        prompts = await self._service.tokenize(asked.prompts, add_special_tokens=asked.add_special_tokens)
        wanted = 1 if asked.wanted_tokens == 0 else asked.wanted_tokens
        rooms = [self._service.room(ids, wanted, DEFAULT_COMPLETION_TOKENS, "prompt") for ids in prompts]
        params = sampling_params(
            asked.sampling,
            self._service.defaults,
            max_tokens=min(rooms),
            logprobs=asked.logprobs,
            echo=asked.echo,
        )
        task = self._task("cmpl", prompts, params, asked.sampling, arrived)
        echo = self._echo(asked, prompts) if asked.echo else None
        reply = CompletionReply(
            self._header(task),
            self._service.tokenizer,
            params.n,
            asked.logprobs,
            echo,
            skip_special_tokens=task.skip_special_tokens,
        )
        return self._answer(task, reply, asked)

    async def _chat(self, body: Mapping[str, object]) -> Response:
        arrived = self._service.metrics.clock.now()
        asked = chat_request(body)
        self._service.check_model(asked.model)
        self._service.check_ready()
        text = await self._service.render(asked)
        prompts = await self._service.tokenize([text], add_special_tokens=False, param="messages")
        room = self._service.room(prompts[0], asked.wanted_tokens, None, "messages")
        params = sampling_params(
            asked.sampling, self._service.defaults, max_tokens=room, logprobs=asked.logprobs
        )
        task = self._task("chatcmpl", prompts, params, asked.sampling, arrived)
        return self._answer(
            task, ChatReply(self._header(task), self._service.tokenizer, asked.logprobs), asked
        )

    def _task(
        self,
        kind: str,
        prompts: tuple[tuple[int, ...], ...],
        params: SamplingParams,
        fields: Fields,
        arrived: float,
    ) -> Task:
        self._check_ids(params)
        count, limit = len(prompts) * params.n, self._service.settings.max_sequences
        if count > limit:
            raise RequestError(
                f"n: {len(prompts)} prompts x n {params.n} = {count} sequences, at most {limit}", param="n"
            )
        skip = fields.flag("skip_special_tokens", True)
        return Task(f"{kind}-{uuid.uuid4().hex}", prompts, params, arrived, skip)

    def _check_ids(self, params: SamplingParams) -> None:
        top = self._service.backend.model.vocab_size
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(token_id for token_id, _ in params.logit_bias)),
        ):
            for token_id in ids:
                if not 0 <= token_id < top:
                    raise RequestError(f"{name}: token id {token_id} is outside [0, {top - 1}]", param=name)

    def _echo(self, asked: CompletionRequest, prompts: Sequence[tuple[int, ...]]) -> Echo:
        tokenizer = self._service.tokenizer
        texts, added = [], []
        for prompt, ids in zip(asked.prompts, prompts, strict=True):
            spelled = tokenizer.decode(ids, skip_special_tokens=False)
            texts.append(prompt if isinstance(prompt, str) else spelled)
            bos = isinstance(prompt, str) and ids[0] in tokenizer.special_ids
            added.append(int(bos and not texts[-1].startswith(tokenizer.token(ids[0]))))
        return Echo(tuple(texts), tuple(prompts), tuple(added), generate=asked.wanted_tokens != 0)

    def _header(self, task: Task) -> Header:
        return Header(task.request_id, int(time.time()), self._service.backend.model.name)

    def _answer(self, task: Task, reply: Reply, asked: CompletionRequest | ChatRequest) -> Answer:
        service = self._service
        options = asked.options if asked.stream else None
        return Answer(
            service.generator, service.inflight, task, reply, options, service.settings.write_deadline
        )
