"""`afserve chat` and `afserve complete` against a running server."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from afserve.cli.chat.command import chat
from afserve.cli.chat.complete import complete
from afserve.cli.top import top
from afserve.errors import PeerLost


def run(command, *arguments: str, text: str | None = None):
    return CliRunner().invoke(command, arguments, input=text)


def test_complete(server):
    done = run(complete, "x", "--url", server.url, "--temperature", "0", "--stop", "fox")
    assert (done.exit_code, done.output) == (0, " the quick brown \n")
    assert server.backend.requests[0].params.max_tokens == 128


def test_complete_from_standard_input_with_echo(server):
    done = run(complete, "--echo", "--url", server.url, text="ab")
    assert done.output == "ab" + server.backend.reply + "\n"


def test_complete_json(server):
    done = run(complete, "x", "--json", "--url", server.url)
    assert json.loads(done.output)["choices"][0]["text"] == server.backend.reply


@pytest.mark.slow
def test_chat_once(server):
    done = run(chat, "hello", "--system", "be brief", "--url", server.url)
    assert done.output == server.backend.reply + "\n"
    prompt = server.backend.tokenizer.decode(server.backend.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"


def test_top_as_json(server, nodes):
    server.backend.nodes = nodes
    done = run(top, "--json", "--frames", "2", "--every", "0.1", "--url", server.url)
    first, second = map(json.loads, done.output.splitlines())
    assert first["model"] == "tiny" and second["tokens_per_s"] == 0
    assert first["nodes"][0] | {"node": "attention-0", "running": 2, "KV": "25%"} == first["nodes"][0]
    assert "running" not in first["nodes"][1]


def test_nothing_to_answer():
    assert run(chat, text=" \n").exit_code == 2


def test_no_server_says_what_to_do():
    for command in (chat, complete):
        done = run(command, "x", "--url", "http://127.0.0.1:9")
        assert isinstance(done.exception, PeerLost) and "afserve up" in done.exception.message


def test_bad_key_file(server, tmp_path):
    done = run(chat, "x", "--url", server.url, "--api-key-file", str(tmp_path / "none"))
    assert "No such file" in str(done.exception)


class Terminal:
    """`afserve chat` on a pseudo-terminal."""

    def __init__(self, url: str, state: Path) -> None:
        self._ours, theirs = pty.openpty()
        # A shell's background job ignores Ctrl-C, and its children inherit that.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code += f"from afserve.cli.chat.command import chat; chat(['--url', {url!r}])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "XDG_STATE_HOME": str(state)},
        )
        os.close(theirs)
        self._unread = ""

    def until(self, text: str) -> str:
        """What was printed up to and with `text`."""
        while text not in self._unread:
            assert select.select([self._ours], [], [], 30)[0], f"no {text!r} after {self._unread!r}"
            self._unread += os.read(self._ours, 4096).decode(errors="replace")
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(server, tmp_path):
    terminal = Terminal(server.url, tmp_path)
    yield terminal
    terminal.close()


def last_prompt(server) -> str:
    return server.backend.tokenizer.decode(server.backend.requests[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.process
def test_conversation(server, terminal, tmp_path):
    terminal.until(">>> ")
    terminal.type("one\\\n")
    terminal.until("... ")
    terminal.type("two\n")
    assert server.backend.reply.strip() in terminal.until("tokens/s")
    terminal.type("more\n")
    terminal.until("tokens/s")
    said = f"<|assistant|>{server.backend.reply}<|end|>"
    assert last_prompt(server) == f"<|user|>one\ntwo<|end|>{said}<|user|>more<|end|><|assistant|>"
    terminal.type("/retry\n")
    terminal.until("tokens/s")
    assert last_prompt(server) == f"<|user|>one\ntwo<|end|>{said}<|user|>more<|end|><|assistant|>"
    terminal.type("/reset\n")
    terminal.type("/system brief\n")
    terminal.type("/params temperature=0.25 seed=7 max_tokens=5\n")
    terminal.until("temperature=0.25")
    terminal.type("/params top_p=x\n")
    terminal.until("give a number, as in top_p=1")
    terminal.type("again\n")
    terminal.until("tokens/s")
    assert last_prompt(server) == "<|system|>brief<|end|><|user|>again<|end|><|assistant|>"
    params = server.backend.requests[-1].params
    assert (params.temperature, params.seed, params.max_tokens) == (0.25, 7, 5)
    terminal.type("/help\n")
    terminal.until("Ctrl-C")
    terminal.type("/exit\n")
    assert terminal.process.wait(20) == 0
    kept = tmp_path / "afserve" / "chat_history"
    assert {"more", "/retry", "again"} <= set(
        kept.read_text().splitlines()
    ) and kept.stat().st_mode & 0o77 == 0


@pytest.mark.process
def test_ctrl_c_stops_the_answer_only(server, terminal):
    server.backend.hold_at = 2
    terminal.until(">>> ")
    terminal.type("one\n")
    terminal.until("th")
    assert server.backend.holding.wait(20)
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("(stopped)")
    assert server.backend.ended.wait(20)
    server.backend.hold_at = None
    terminal.type("two\n")
    terminal.until("tokens/s")
    terminal.until(">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


@pytest.mark.process
def test_a_refused_message_does_not_end_the_conversation(server, terminal):
    terminal.until(">>> ")
    terminal.type("word " * 200 + "\n")
    terminal.until("context of 256")
    terminal.type("short\n")
    terminal.until("tokens/s")
    assert last_prompt(server) == "<|user|>short<|end|><|assistant|>"
