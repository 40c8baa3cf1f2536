"""`python -m bench.scripted_server`: an OpenAI-compatible server that answers by script, to check load clients with.

Its delays are known, and tests have it refuse and break off too.
"""

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PROMPT = 7  # tokens that every prompt is said to have


@dataclass
class Script:
    """Seconds before the first token and between tokens; `errors` maps the n-th request to a status or "break"."""

    first: float = 0.0
    gap: float = 0.0
    errors: dict[int, int | str] = field(default_factory=dict)
    usage: bool = True
    chunked: bool = True
    close_after: bool = False
    together: int = 0  # so many requests are there before the first one is answered
    bodies: list[dict] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0


@contextlib.contextmanager
def serving(script: Script, port: int = 0) -> Iterator[str]:
    """Its URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(lambda r, w: _client(script, r, w), "127.0.0.1", port)
    )
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
    try:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await _converse(script, reader, writer)
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()  # or its loop may end before


async def _converse(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await _head(reader):
        script.heads.append(head)
        length = next((int(x[15:]) for x in head.lower().split("\r\n") if x.startswith("content-length:")), 0)
        body = await reader.readexactly(length)
        if head.startswith("HEAD"):
            writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
        elif head.startswith("GET"):
            _plain(writer, 200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        else:
            number = len(script.bodies)
            script.bodies.append(json.loads(body))
            await _answer(script, number, writer)
        await writer.drain()
        if script.close_after:
            return


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
    if not asked.get("stream"):
        await asyncio.sleep(script.first + script.gap * (wanted(asked) - 1))
        _plain(writer, 200, _whole(asked))
        return
    framing = "Transfer-Encoding: chunked" if script.chunked else "Connection: close"
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())
    tokens = wanted(asked)
    while len(script.bodies) < script.together:
        await asyncio.sleep(0.005)
    kind = "chat.completion.chunk" if "messages" in asked else "text_completion"
    head = {"id": "scripted", "object": kind, "created": 1, "model": "scripted"}
    loop = asyncio.get_running_loop()
    due = loop.time() + script.first
    for token in range(tokens):
        await asyncio.sleep(max(0.0, due + script.gap * token - loop.time()))  # lateness does not add up
        if error == "break" and token == 1:
            writer.close()
            return
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if token + 1 == tokens else None}
        choice |= {"delta": {"content": "x"}} if "messages" in asked else {"text": "x"}
        _event(script, writer, json.dumps({**head, "choices": [choice]}))
    if script.usage:
        usage = {"prompt_tokens": PROMPT, "total_tokens": PROMPT + tokens, "completion_tokens": tokens}
        _event(script, writer, json.dumps({**head, "choices": [], "usage": usage}))
    _event(script, writer, "[DONE]")
    writer.write(b"0\r\n\r\n" if script.chunked else b"")
    if not script.chunked:
        writer.close()


def wanted(asked: dict) -> int:
    """Tokens that a request asks for, under either name."""
    return int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)


def _whole(asked: dict) -> dict:
    tokens, choice = wanted(asked), {"index": 0, "finish_reason": "length"}
    text = "x" * tokens
    choice |= {"message": {"role": "assistant", "content": text}} if "messages" in asked else {"text": text}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": tokens, "total_tokens": PROMPT + tokens}
    kind = "chat.completion" if "messages" in asked else "text_completion"
    return {"id": "scripted", "object": kind, "model": "scripted", "choices": [choice], "usage": usage}


def _event(script: Script, writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n" if script.chunked else event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first", type=float, default=0.1, help="seconds before the first token")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between tokens")
    options = parser.parse_args()
    with (
        serving(Script(options.first, options.gap), options.port) as url,
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(f"{url}: {options.first:g} s, then a token every {options.gap:g} s; Ctrl-C ends it", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
