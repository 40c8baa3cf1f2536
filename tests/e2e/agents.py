"""`python -m tests.e2e.agents NAME FOLDER MODEL CONTEXT QUESTION CALL...`: a coding agent from npm against this server.

Runs in a network namespace of its own, so that nothing but the server can be reached. The model is scripted: with n
results in its prompt it says the n-th CALL, and behind the last one what its result is. FOLDER is the agent's home and
working folder. Prints one JSON object: the agent's exit code and output, every request with its answer's status and
headers, every prompt, how many results each has and how much of it a cache would have found.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afserve.control.backend import ServedModel
from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer
from tests.server.conftest import ScriptedBackend, Server

SECONDS = 120.0
FOLDER = Path(__file__).resolve().parents[2] / "configs" / "nano"
# Where the packages are: a folder with node_modules, else the commands of the path.
PACKAGES = "AFSERVE_AGENTS"
RESULT = "<tool_response>"
BLOCK = 16
CODEX = """model = "{model}"
model_provider = "afserve"
[model_providers.afserve]
name = "afserve"
base_url = "{url}/v1"
wire_api = "responses"
"""


OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {"afserve": {"npm": "@ai-sdk/openai-compatible"}},
}
AIDER = (
    "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-pretty",
    "--no-fancy-input", "--map-tokens", "0",
)  # fmt: skip
QUIET = ("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_LSP_DOWNLOAD")


def command_of(agent: str) -> str | None:
    """The agent's command, None where it is not installed."""
    folder = os.environ.get(PACKAGES)
    places = [Path(folder) / "node_modules" / ".bin", Path(folder) / "venv" / "bin"] if folder else []
    return shutil.which(agent, path=os.pathsep.join(map(str, places)) if folder else None)


def blocks_in_common(one: Sequence[int], other: Sequence[int]) -> int:
    count = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return count // BLOCK


@dataclass
class PlayedBackend(ScriptedBackend):
    """Answers with the call that follows as many results as are in the prompt, behind the last one with its result.

    `results` has their number by prompt, `found` the share of its tokens that a cache of blocks of 16 would have found.
    """

    calls: Sequence[str] = ()
    speaks_only: bool = False  # one that knows no tools is told the calls one after the other
    prompts: list[str] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    known: list[Sequence[int]] = field(default_factory=list)
    per_event: int = 8

    def answer_to(self, request):
        text = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        self.prompts.append(text)
        given = len(self.results) if self.speaks_only else text.count(RESULT)
        self.results.append(given)
        result = text.rpartition(RESULT)[2].partition("</tool_response>")[0].strip()
        told = self.calls[given] if given < len(self.calls) else f"The result: {result}"
        answer = [*self.tokenizer.encode(told, add_special_tokens=False), 1][: request.params.max_tokens]
        self.note_found(request.prompt_ids, answer)
        return answer

    def note_found(self, prompt, answer):
        blocks = [blocks_in_common(prompt, one) for one in self.known]
        self.found.append(max(blocks, default=0) * BLOCK / len(prompt))
        self.known.append([*prompt, *answer])


class Recorded:
    """The application, and what is asked of it."""

    def __init__(self, app):
        self._app, self.state = app, app.state
        self.requests: list[dict[str, object]] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen: dict[str, object] = {
            "path": scope["path"],
            "body": "",
            "status": 0,
            "headers": {},
            "answer": "",
        }
        self.requests.append(seen)

        async def received():
            message = await receive()
            seen["body"] += message.get("body", b"").decode()
            return message

        async def sent(message):
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                seen["headers"] = {name.decode(): value.decode() for name, value in message["headers"]}
            seen["answer"] += message.get("body", b"").decode()
            await send(message)

        await self._app(scope, received, sent)


def call_of(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def environment(home: Path, url: str) -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "IS_SANDBOX": "1",
        **dict.fromkeys(QUIET, "1"),
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "none",
    }


def arguments(agent: str, command: str, model: str, question: str) -> Sequence[str]:
    if agent == "claude":
        tail = ("--output-format", "json", "--model", model, "--allowedTools", "Read")
        return (command, "-p", question, *tail)
    if agent == "opencode":
        return (command, "run", "--model", f"afserve/{model}", question)
    if agent == "aider":
        return (command, "--model", f"openai/{model}", *AIDER)
    return (command, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", question)


def configure(home: Path, url: str, model: str, context: int) -> None:
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(model=model, url=url))
    said = json.loads(
        json.dumps({**OPENCODE, "model": f"afserve/{model}", "small_model": f"afserve/{model}"})
    )
    provider = said["provider"]["afserve"]
    provider["options"] = {"baseURL": f"{url}/v1", "apiKey": "none"}
    served = {"name": model, "tool_call": True, "limit": {"context": context, "output": 4096}}
    provider["models"] = {model: served}
    (home / "opencode.json").write_text(json.dumps(said))


def play(
    agent: str, home: Path, model: str, context: int, question: str, *calls: str
) -> Mapping[str, object]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    tokenizer = Tokenizer.from_folder(FOLDER)
    served = ServedModel(model, str(FOLDER), context, tokenizer.vocab_size, 1_700_000_000)
    backend = PlayedBackend(served, tokenizer, calls=calls, speaks_only=agent == "aider")
    server = Server(backend, tokenizer, ServerSettings())
    recorded = server.app = Recorded(server.app)
    server.start()
    try:
        configure(home, server.url, model, context)
        command = command_of(agent)
        assert command is not None, f"{agent} is not installed"
        said = f"{question}\n" * len(calls) if agent == "aider" else ""
        done = subprocess.run(
            arguments(agent, command, model, question),
            env=environment(home, server.url), cwd=home, input=said, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    finally:
        server.stop()
    return {
        "rc": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "requests": recorded.requests,
        "prompts": backend.prompts,
        "results": backend.results,
        "found": backend.found,
    }


if __name__ == "__main__":
    agent, home, model, context, *told = sys.argv[1:]
    print(json.dumps(play(agent, Path(home), model, int(context), *told)))
