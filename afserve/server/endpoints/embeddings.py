"""POST /v1/embeddings: each input's pooled hidden state, computed as a prompt is, by the same engine."""

import base64
import json
from array import array
from collections.abc import Callable

from afserve.engine.scheduling.request import TokenEvent
from afserve.errors import RequestError
from afserve.server.answers.generation import Task
from afserve.server.endpoints.prompts import PromptsEndpoint
from afserve.server.endpoints.service import Service
from afserve.server.text.kinds import BodyKind

# Model, task, vectors (bytes of float32), facts of the request -> the body.
Drawn = Callable[[str, Task, list[bytes], object], bytes]
LONGEST_NUMBER = 16  # bytes of one with its comma, as -1.23456789e-05,


class EmbeddingsEndpoint(PromptsEndpoint[bytes]):
    """The endpoint of one API, whose words `drawn` has, as an ASGI application."""

    reason = "pooled"

    def __init__(
        self, service: Service, kind: BodyKind = BodyKind.EMBEDDING, drawn: Drawn | None = None
    ) -> None:
        super().__init__(service, kind)
        self._drawn = drawn or _body

    def take_event(self, event: TokenEvent, task: Task) -> bytes | None:
        if not event.pooled:
            return None
        self._check_size(len(event.pooled), task.choices, _is_base64(task.asked.facts))
        return event.pooled

    def draw_body(self, task: Task, results: list[bytes], seconds: float) -> bytes:
        return self._drawn(task.asked.model, task, results, task.asked.facts)

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
