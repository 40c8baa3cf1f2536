"""POST /v1/embeddings: each input's pooled hidden state, computed as a prompt is, by the same engine."""

import asyncio
import base64
import json
import time
import uuid
from array import array
from collections.abc import Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from afserve.errors import AfserveError, ProtocolError, RequestError
from afserve.server.access.accounts import account_of
from afserve.server.answers.answering import Watched, within
from afserve.server.answers.generation import Task
from afserve.server.answers.hosted import Hosted
from afserve.server.answers.writer import Whole
from afserve.server.bodies.prepared import Prepared
from afserve.server.endpoints.service import Service
from afserve.server.http.body import until_gone
from afserve.server.metrics.spans import origin_of
from afserve.server.replies.choice import raise_failure
from afserve.server.text.prepare import BodyKind

# Model, task, vectors (bytes of float32), facts of the request -> the body.
Drawn = Callable[[str, Task, list[bytes], object], bytes]
LONGEST_NUMBER = 16  # bytes of one with its comma, as -1.23456789e-05,


class EmbeddingsEndpoint:
    """The endpoint of one API, whose words `drawn` has, as an ASGI application."""

    def __init__(
        self, service: Service, kind: BodyKind = BodyKind.EMBEDDING, drawn: Drawn | None = None
    ) -> None:
        self._service, self._kind, self._drawn = service, kind, drawn or _body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with await service.bodies.read_body(Request(scope, receive)) as body, service.answering.enter():
            arrived = service.http.clock.now()
            service.check_serving()
            asked = await service.text.prepare(self._kind, body.data)
            body.release_bytes()
            assert isinstance(asked, Prepared)
            account = account_of(scope)
            model, asked = service.admitted(asked, account.scheduled(asked.scheduling))
            id, choices = uuid.uuid4().hex, len(asked.prompts)
            watched = Watched(id, account.owner, int(time.time()), asked.model, choices, stream=False)
            task = Task(id, asked, arrived, account, origin=origin_of(scope), watched=watched)
            service.answering.watch_request(watched)
            vectors = await until_gone(receive, self._vectors(model, task, base64=_is_base64(asked.facts)))
            data = await asyncio.to_thread(self._drawn, asked.model, task, vectors, asked.facts)
            send = service.ignored.naming(send, asked.ignored)
            await Whole([data], service.settings.write_deadline)(scope, receive, send)

    async def _vectors(self, model: Hosted, task: Task, base64: bool) -> list[bytes]:
        """In the order of the inputs. The first failure ends all."""
        model.metrics.prompt_tokens.add(task.prompt_tokens)
        task.account.spend(task.prompt_tokens)
        async with within(task.asked.scheduling.deadline, watched=task.watched):
            try:
                async with asyncio.TaskGroup() as group:
                    ones = [
                        group.create_task(self._one(model, task, number, base64))
                        for number in range(task.choices)
                    ]
            except* AfserveError as failed:
                raise failed.exceptions[0] from None
        return [one.result() for one in ones]

    async def _one(self, model: Hosted, task: Task, number: int, base64: bool) -> bytes:
        metrics, reason = model.metrics, "abort"
        began = task.arrived
        try:
            async with aclosing(model.backend.open(task.request(number)).events()) as events:
                async for event in events:
                    raise_failure(event)
                    metrics.cached_tokens.add(event.cached_tokens)
                    if event.pooled:
                        self._check_size(len(event.pooled), task.choices, base64)
                        reason = "pooled"
                        return event.pooled
            raise ProtocolError(f"{task.request_id}-{number}: the engine ended it without a vector")
        finally:
            metrics.finished.add(1, reason)
            metrics.request.observe(metrics.clock.now() - began)

    def _check_size(self, size: int, inputs: int, base64: bool) -> None:
        """By the first vector, of `size` bytes: all have as many numbers."""
        most = self._service.settings.max_answer_bytes
        written = inputs * (size * 4 // 3 if base64 else size * LONGEST_NUMBER // 4)
        if written > most:
            other = "" if base64 else " or with encoding_format base64,"
            raise RequestError.about(
                "input",
                f"{inputs} vectors make an answer of up to {written} bytes, more than {most}, the limit of "
                f"--max-answer-bytes; send it{other} in parts",
            )


def _is_base64(facts: object) -> bool:
    assert isinstance(facts, dict)
    return bool(facts["base64"])


def _body(model: str, task: Task, vectors: list[bytes], facts: object) -> bytes:
    drawn = _in_base64 if _is_base64(facts) else _in_numbers
    data = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{drawn(vector)}}}'
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": task.prompt_tokens, "total_tokens": task.prompt_tokens}
    tail = f'"model":{json.dumps(model)},"usage":{json.dumps(usage)}'
    return f'{{"object":"list","data":[{data}],{tail}}}'.encode()


def _in_base64(vector: bytes) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return f'"{base64.b64encode(vector).decode()}"'


def _in_numbers(vector: bytes) -> str:
    """Nine digits give every float32 back."""
    return f"[{','.join(f'{number:.9g}' for number in array('f', vector))}]"


def ollama_vectors(model: str, task: Task, vectors: list[bytes], facts: object) -> bytes:
    data = ",".join(map(_in_numbers, vectors))
    counts = f'"total_duration":0,"load_duration":0,"prompt_eval_count":{task.prompt_tokens}'
    return f'{{"model":{json.dumps(model)},"embeddings":[{data}],{counts}}}'.encode()


def ollama_vector(model: str, task: Task, vectors: list[bytes], facts: object) -> bytes:
    """The body of /api/embeddings, which has one."""
    return f'{{"embedding":{_in_numbers(vectors[0])}}}'.encode()
