"""Sessions of five turns with a tool by SDKs and frameworks as the registries have them: each call arrives as the model
said it, and from the second turn on nearly all of a prompt is what the cache has. Skipped where absent.

`AFSERVE_AGENTS` names a folder with `node_modules`, and with a virtual environment `venv` for those of Python; without
that, this interpreter is asked.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from afserve.control.backend import ServedModel
from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer
from tests.e2e.agents import FOLDER, PACKAGES, PlayedBackend, call_of
from tests.server.conftest import Server

pytestmark = [pytest.mark.process, pytest.mark.slow]
CLIENTS = Path(__file__).parent / "clients"
SECONDS, TURNS, CONTEXT = 120.0, 5, 32_768
PYTHON = {
    "openai_sdk.py": ["openai"],
    "openai_responses.py": ["openai"],
    "anthropic_sdk.py": ["anthropic"],
    "pydantic_agent.py": ["pydantic_ai", "openai"],
    "langgraph_agent.py": ["langgraph", "langchain_openai"],
}
NODE = {
    "openai_sdk.mjs": ["openai"],
    "anthropic_sdk.mjs": ["@anthropic-ai/sdk"],
    "ai_sdk.mjs": ["ai", "@ai-sdk/openai-compatible"],
    "ai_sdk_anthropic.mjs": ["ai", "@ai-sdk/anthropic"],
}
TYPED = {"typed_openai.py": ["openai"], "typed_anthropic.py": ["anthropic"]}
TSC = ("--strict", "--module", "nodenext", "--target", "es2022", "--types", "node", "--skipLibCheck")
CALLS = [call_of("look", {"drawer": drawer}) for drawer in range(TURNS)]


@pytest.fixture
def played():
    tokenizer = Tokenizer.from_folder(FOLDER)
    served = ServedModel("nano", str(FOLDER), CONTEXT, tokenizer.vocab_size, 1_700_000_000)
    backend = PlayedBackend(served, tokenizer, calls=CALLS)
    server = Server(backend, tokenizer, ServerSettings())
    server.start()
    try:
        yield backend, server.url
    finally:
        server.stop()


def python_with(modules):
    """An interpreter that has them."""
    own = Path(os.environ.get(PACKAGES, "")) / "venv" / "bin" / "python"
    looks = f"from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, {modules!r})))"
    for python in [str(own)] * own.is_file() + [sys.executable]:
        if not subprocess.run(
            [python, "-c", looks], capture_output=True, check=False, timeout=SECONDS
        ).returncode:
            return python
    pytest.skip(f"{', '.join(modules)}: not installed")


def packages_with(names):
    packages = Path(os.environ.get(PACKAGES, "")) / "node_modules"
    if not shutil.which("node") or not all((packages / name).is_dir() for name in names):
        pytest.skip(f"{', '.join(names)}: not installed")
    return packages


def run_whole(cwd, *command):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(backend, command, cwd):
    told = json.loads(run_whole(cwd, *command).splitlines()[-1])
    assert told["calls"] == [{"drawer": drawer} for drawer in range(TURNS)]
    assert told["text"] == "The result: drawer 4 has 40 spoons, as it did last week"
    assert backend.results == list(range(TURNS + 1)), "one prompt for each turn, each with what came before"
    assert min(backend.found[1:]) >= 0.95, backend.found


@pytest.mark.parametrize("client", PYTHON)
def test_python(played, client):
    backend, url = played
    check(backend, [python_with(PYTHON[client]), str(CLIENTS / client), url], CLIENTS)


@pytest.mark.parametrize("client", NODE)
def test_node(played, client, tmp_path):
    backend, url = played
    packages = packages_with(NODE[client])
    for file in CLIENTS.glob("*.mjs"):
        shutil.copy(file, tmp_path)
    (tmp_path / "node_modules").symlink_to(packages)
    check(backend, ["node", client, url], tmp_path)


@pytest.mark.parametrize("client", TYPED)
def test_answers_are_what_the_sdks_types_say(played, client):
    """A program that its type checker takes sends what is ours, and validates answers strictly."""
    run_whole(CLIENTS, python_with(TYPED[client]), str(CLIENTS / client), played[1])


@pytest.mark.long
@pytest.mark.parametrize("client", TYPED)
def test_a_type_checker_takes_what_is_sent(client):
    """It reads the SDK and that program, and nothing of ours."""
    python, options = (
        python_with([*TYPED[client], "mypy"]),
        ("--config-file", os.devnull, "--cache-dir", os.devnull),
    )
    run_whole(CLIENTS, python, "-m", "mypy", "--strict", *options, str(CLIENTS / client))


def test_answers_are_what_the_sdks_for_javascript_say(played, tmp_path):
    packages = packages_with(["openai", "@anthropic-ai/sdk", "typescript", "@types/node"])
    shutil.copy(CLIENTS / "typed.ts", tmp_path)
    (tmp_path / "node_modules").symlink_to(packages)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    run_whole(tmp_path, str(packages / ".bin" / "tsc"), *TSC, "typed.ts")
    run_whole(tmp_path, "node", "typed.js", played[1])
