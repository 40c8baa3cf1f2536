"""A steady load whose domain switches: streams in a closed loop, when each token came, what was said.

Prompts are cut from the Python standard library: functions for one domain, docstrings for the other. It knows HTTP
and no cluster.
"""

import ast
import asyncio
import itertools
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

MODULES = ("argparse", "ast", "bisect", "calendar", "cmd", "configparser", "csv", "difflib", "fractions", "heapq",
           "inspect", "ipaddress", "pathlib", "pprint", "random", "shlex", "statistics", "tarfile", "textwrap",
           "zipfile")  # fmt: skip
POOL = 32
LONGEST = 160  # characters of a prompt


@dataclass(slots=True)
class Heard:
    """What clients of one run saw. `gaps`: seconds between two tokens of a stream; `texts`: prompt -> all answers."""

    gaps: list[float] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)
    failed: int = 0
    tokens: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.gaps)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def domains() -> dict[str, list[str]]:
    """POOL prompts of source code and as many of prose."""
    code, prose = [], []
    for module in MODULES:
        text = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text(encoding="utf-8")
        for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
            doc, source = ast.get_docstring(function), ast.get_source_segment(text, function)
            if doc and len(doc) > LONGEST:
                prose.append('"""' + doc[: LONGEST - 3])
            elif not doc and source and len(source) > LONGEST:
                code.append(source[:LONGEST])
    return {"code": _spread(code), "prose": _spread(prose)}


def _spread(found: list[str]) -> list[str]:
    return found[:: max(1, len(found) // POOL)][:POOL]


async def steady(
    url: str, prompts: list[str], seconds: float, streams: int, tokens: int, heard: Heard
) -> None:
    """`streams` at a time, each asking again when it is answered; none is begun after `seconds`."""
    until, order = time.monotonic() + seconds, itertools.cycle(prompts)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as client:
        await asyncio.gather(*(_stream(client, order, until, tokens, heard) for _ in range(streams)))


async def _stream(
    client: httpx.AsyncClient, order: Iterator[str], until: float, tokens: int, heard: Heard
) -> None:
    while time.monotonic() < until:
        prompt = next(order)
        try:
            text = await _answer(client, prompt, tokens, heard)
        except (httpx.HTTPError, ValueError, KeyError):
            heard.failed += 1
        else:
            heard.texts.setdefault(prompt, set()).add(text)


async def _answer(client: httpx.AsyncClient, prompt: str, tokens: int, heard: Heard) -> str:
    """Raises what went wrong, an error inside the stream included."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    parts, before, ended = [], 0.0, False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            now = time.monotonic()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                break
            parts.append(json.loads(line[6:])["choices"][0]["text"])
            if before:
                heard.gaps.append(now - before)
            before = now
            heard.tokens += 1
    if not ended:
        raise ValueError("the stream broke off")
    return "".join(parts)
