"""An OpenAI-compatible server on a real socket that answers by script: known delays, counts, refusals and breaks."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Script:
    """Seconds before the first token and between tokens; `errors` maps the n-th request to a status or "break"."""

    first: float = 0.0
    gap: float = 0.0
    errors: dict[int, int | str] = field(default_factory=dict)
    usage: bool = True
    chunked: bool = True
    close_after: bool = False
    bodies: list[dict] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0


@contextlib.contextmanager
def serving(script: Script) -> Iterator[str]:
    """Its URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(lambda r, w: _client(script, r, w), "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _client(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    script.connections += 1
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while head := await _head(reader):
            script.heads.append(head)
            length = next(
                (int(x[15:]) for x in head.lower().split("\r\n") if x.startswith("content-length:")), 0
            )
            body = await reader.readexactly(length)
            if head.startswith("GET"):
                _plain(writer, 200, {"data": [{"id": "scripted"}]})
            else:
                number = len(script.bodies)
                script.bodies.append(json.loads(body))
                await _answer(script, number, writer)
            await writer.drain()
            if script.close_after:
                break
    writer.close()


async def _head(reader: asyncio.StreamReader) -> str:
    with contextlib.suppress(asyncio.IncompleteReadError):
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    return ""


def _plain(writer: asyncio.StreamWriter, status: int, body: dict) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


async def _answer(script: Script, number: int, writer: asyncio.StreamWriter) -> None:
    error, asked = script.errors.get(number), script.bodies[number]
    if isinstance(error, int):
        _plain(writer, error, {"error": {"message": "as scripted"}})
        return
    framing = "Transfer-Encoding: chunked" if script.chunked else "Connection: close"
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())
    for token in range(asked["max_tokens"]):
        await asyncio.sleep(script.gap if token else script.first)
        if error == "break" and token == 1:
            writer.close()
            return
        choice = {"index": 0, "finish_reason": "length" if token + 1 == asked["max_tokens"] else None}
        choice |= {"delta": {"content": "x"}} if "messages" in asked else {"text": "x"}
        _event(script, writer, json.dumps({"choices": [choice]}))
    if script.usage:
        usage = {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}
        _event(script, writer, json.dumps({"choices": [], "usage": usage}))
    _event(script, writer, "[DONE]")
    writer.write(b"0\r\n\r\n" if script.chunked else b"")
    if not script.chunked:
        writer.close()


def _event(script: Script, writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n" if script.chunked else event)
