"""A steady load whose domain switches: streams in a closed loop, when each token came, what was said.

Prompts are cut from the Python standard library: functions for one domain, docstrings for the other. It knows HTTP
and no cluster.
"""

import ast
import itertools
import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from afserve.cli.load.asks import COMPLETIONS, Ask, RequestForm
from afserve.cli.load.connection import ConnectionPool, Server
from afserve.cli.load.heard import COMPLETED, Heard
from afserve.cli.load.loops import LoadPlan, run

MODULES = ("argparse", "ast", "bisect", "calendar", "cmd", "configparser", "csv", "difflib", "fractions", "heapq",
           "inspect", "ipaddress", "pathlib", "pprint", "random", "shlex", "statistics", "tarfile", "textwrap",
           "zipfile")  # fmt: skip
POOL = 32
LONGEST = 160  # characters of a prompt


@dataclass(slots=True)
class Answers:
    """What clients of one run saw. `gaps`: seconds between two tokens of a stream; `texts`: prompt -> all answers."""

    gaps: list[float] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)
    failed: int = 0
    tokens: int = 0

    def add(self, prompt: str, heard: Heard) -> None:
        self.gaps += heard.gaps
        self.tokens += heard.tokens
        if heard.outcome == COMPLETED and isinstance(heard, Read):
            self.texts.setdefault(prompt, set()).add(heard.text)
        else:
            self.failed += 1

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


class Read(Heard):
    """With what was said."""

    text = ""

    def event(self, data: bytes, now: float) -> bool:
        over = super().event(data, now)
        if not over:
            self.text += "".join(choice["text"] for choice in json.loads(data)["choices"])
        return over


async def steady(
    url: str, prompts: list[str], seconds: float, streams: int, tokens: int, found: Answers
) -> None:
    """`streams` at a time, each asking again when it is answered; none is begun after `seconds`."""
    connections = ConnectionPool(Server.from_url(url, None))
    async with httpx.AsyncClient(timeout=120) as client:
        listed = (await client.get(f"{url}/v1/models")).raise_for_status().json()
    form = RequestForm(COMPLETIONS, listed["data"][0]["id"])
    asks = (Ask({"prompt": prompt}, tokens) for prompt in itertools.cycle(prompts))
    plan = LoadPlan(form, asks, streams, seconds=seconds, timeout=120, hears=Read)
    try:
        ran = await run(plan, connections)
    finally:
        connections.close()
    for prompt, heard in zip(itertools.cycle(prompts), ran.heard, strict=False):
        found.add(prompt, heard)
