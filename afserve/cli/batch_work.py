"""The requests of a batch on their way: so many at once, again where a server is full, each answer a line."""

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import httpx

from afserve.cli.batch_lines import Line
from afserve.doors.client_http import backoff

_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
Row = dict[str, Any]  # a line of the output


@dataclass(frozen=True, slots=True)
class Manner:
    """How requests are sent. `timeout` in seconds for one answer."""

    url: str
    key: str | None
    concurrency: int
    retries: int
    timeout: float

    def client(self) -> httpx.AsyncClient:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=self.timeout, limits=limits)


async def work(lines: Sequence[Line], manner: Manner, out: IO[str], told: Callable[[bool], None]) -> None:
    """Writes a line for each; `told` hears of each whether it was answered well."""
    waiting = iter(lines)
    async with manner.client() as http, asyncio.TaskGroup() as group:
        for _ in range(min(manner.concurrency, len(lines))):
            group.create_task(_some(waiting, http, manner, out, told))


async def _some(
    lines: Iterator[Line], http: httpx.AsyncClient, manner: Manner, out: IO[str], told: Callable[[bool], None]
) -> None:
    for line in lines:
        row = await _answer(http, line, manner.retries)
        out.write(json.dumps(row) + "\n")
        out.flush()
        told(row["error"] is None and row["response"]["status_code"] == httpx.codes.OK)


async def _answer(http: httpx.AsyncClient, line: Line, retries: int) -> Row:
    row: Row = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    for tries in range(1, retries + 2):
        last = tries > retries
        try:
            response = await http.post(line.url, content=line.body)
        except httpx.HTTPError as error:
            if last or isinstance(error, httpx.ReadTimeout):
                message = f"{type(error).__name__}: {error}"
                return {**row, "response": None, "error": {"code": "no_answer", "message": message}}
            await asyncio.sleep(backoff(tries))
            continue
        if last or response.status_code not in _BUSY:
            break
        await asyncio.sleep(backoff(tries, _asked(response)))
    request_id = response.headers.get("x-request-id", row["id"])
    answer = {"status_code": response.status_code, "request_id": request_id, "body": _body(response)}
    return {**row, "response": answer, "error": None}


def _body(response: httpx.Response) -> object:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return {"error": {"message": response.text[:1000]}}


def _asked(response: httpx.Response) -> float:
    """Seconds of Retry-After; one where it says none."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "1")))
    except ValueError:
        return 1.0
