"""Claude Code, Codex and opencode as npm has them, and aider, unchanged: the server is real, the model scripted. They
skip where absent.

`AFSERVE_AGENTS` names a folder in which `npm install @anthropic-ai/claude-code @openai/codex opencode-ai` ran, with a
virtual environment `venv` for aider.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.e2e.agents import call_of, command_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.alone,
    pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare(1)"),
]
SECONDS = 240.0
WORDS = "The colour is teal."
QUESTION = "What does note.txt say?"
IGNORED = "x-afserve-ignored"


@pytest.fixture
def play(tmp_path):
    (tmp_path / "note.txt").write_text(WORDS + "\n")

    def play(agent, model, *calls, context=131_072):
        if command_of(agent) is None:
            pytest.skip(f"{agent} is not installed")
        command = (
            "unshare",
            "--net",
            sys.executable,
            "-m",
            "tests.e2e.agents",
            agent,
            tmp_path,
            model,
            context,
        )
        done = subprocess.run(
            [*map(str, command), QUESTION, *calls],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["rc"] == 0, told
        return told

    return play


def asked(told, path):
    return [each for each in told["requests"] if each["path"] == path]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "nano"])
def test_claude_code(play, tmp_path, model):
    """It asks for a file, gets it read and says what is in it: with a model that it knows, and with another one."""
    told = play("claude", model, call_of("Read", {"file_path": str(tmp_path / "note.txt")}))
    assert WORDS in json.loads(told["stdout"])["result"]
    requests = asked(told, "/v1/messages")
    assert {each["status"] for each in requests} == {200}
    assert {"thinking", "context_management"} <= set(requests[-1]["headers"][IGNORED].split(", "))
    assert "x-anthropic-billing-header" in requests[-1]["body"]
    assert not any("billing" in prompt[:2000] for prompt in told["prompts"])


@pytest.mark.slow
def test_claude_code_finds_tools(play, tmp_path):
    """It sends their definitions when its own search is asked for them; what was said before stays found."""
    calls = [
        call_of("ToolSearch", {"query": "select:WebFetch"}),
        call_of("Read", {"file_path": str(tmp_path / "note.txt")}),
    ]
    told = play("claude", "nano", *calls)
    if "ToolSearch" not in told["prompts"][0]:
        pytest.skip("this Claude Code sends all its tools from the start")
    assert {each["status"] for each in asked(told, "/v1/messages")} == {200}
    assert told["prompts"][1].startswith(told["prompts"][0]) and told["results"] == [0, 1, 2]
    assert "<function>" in told["prompts"][1].removeprefix(told["prompts"][0])


@pytest.mark.slow
def test_claude_code_asks_for_less_where_its_context_is_small(play, tmp_path):
    told = play(
        "claude",
        "claude-sonnet-4-5",
        call_of("Read", {"file_path": str(tmp_path / "note.txt")}),
        context=60_000,
    )
    assert WORDS in json.loads(told["stdout"])["result"]
    assert {each["status"] for each in asked(told, "/v1/messages")} == {200, 400}


def look_at(told):
    """What each turn of five found of its prompt, as the agent's own requests go."""
    found = dict(zip(told["results"], told["found"], strict=True))
    assert sorted(found) == list(range(6)), told["results"]
    assert min(found[turn] for turn in range(1, 6)) >= 0.95, told["found"]


def drawers(folder):
    files = [folder / f"note{number}.txt" for number in range(5)]
    for number, file in enumerate(files):
        file.write_text(f"Drawer {number} is teal.\n")
    return files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "tool", "name"), [("claude", "Read", "file_path"), ("opencode", "read", "filePath")]
)
def test_five_turns_of_an_agent_that_reads_files(play, tmp_path, agent, tool, name):
    told = play(agent, "nano", *(call_of(tool, {name: str(file)}) for file in drawers(tmp_path)))
    assert all(f"Drawer {number} is teal." in told["prompts"][-1] for number in range(5))
    assert "Drawer 4 is teal." in told["stdout"]
    look_at(told)


@pytest.mark.slow
def test_five_turns_of_codex(play):
    commands = [f"echo drawer-$(({turn}+40))" for turn in range(5)]
    told = play("codex", "nano", *(call_of("exec_command", {"cmd": command}) for command in commands))
    assert all(f"drawer-{turn + 40}" in told["prompts"][-1] for turn in range(5))
    assert "drawer-44" in told["stdout"]
    look_at(told)


@pytest.mark.slow
def test_five_turns_of_aider(play, tmp_path):
    """It knows no tools: its answers are files. It puts their words behind the conversation, where they change."""
    told = play(
        "aider", "nano", *(f"Done.\n\nnote{n}.txt\n```\nDrawer {n} is teal.\n```\n" for n in range(5))
    )
    assert [(tmp_path / f"note{n}.txt").read_text() for n in range(5)] == [
        f"Drawer {n} is teal.\n" for n in range(5)
    ]
    assert {each["status"] for each in asked(told, "/v1/chat/completions")} == {200} and len(
        told["prompts"]
    ) == 5
    assert all(found > 0.4 for found in told["found"][1:])


@pytest.mark.slow
def test_codex(play):
    told = play("codex", "nano", call_of("exec_command", {"cmd": "cat note.txt"}))
    assert WORDS in told["stdout"]
    requests = asked(told, "/v1/responses")
    assert {each["status"] for each in requests} == {200}
    assert requests[0]["headers"][IGNORED] == "tools.web_search"


@pytest.mark.slow
def test_codex_calls_into_its_namespace(play):
    """It knows the call as its own: it finds fault with the agent's name."""
    told = play("codex", "nano", call_of("multi_agent_v1__close_agent", {"target": "nobody"}))
    assert "invalid agent id nobody" in told["stdout"]


@pytest.mark.slow
def test_codex_patches(play, tmp_path):
    """Of a model that it knows it sends a tool that takes free text."""
    patch = "*** Begin Patch\n*** Add File: new.txt\n+made\n*** End Patch"
    told = play("codex", "gpt-5.5", call_of("apply_patch", {"input": patch}))
    assert "Success" in told["stdout"] and (tmp_path / "new.txt").read_text() == "made\n"
