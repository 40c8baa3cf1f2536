"""The examples as they stand, against nano behind HTTP in this process; the offline one starts its own nodes."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from afserve.cli.main import run
from afserve.cli.up import asked_of, up
from afserve.launch.processes import forker
from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer
from tests.patching import patch_library
from tests.server.conftest import Server
from tests.server.nano import FOLDER, NanoBackend
from tests.warm.interpreter import WARM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def url():

    server = Server(NanoBackend(), Tokenizer.from_folder(FOLDER), ServerSettings())
    server.start()
    yield server.url
    server.stop()


def printed(name, url, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, url])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_stream(url, monkeypatch, capsys):
    assert printed("stream.py", url, monkeypatch, capsys).strip()


@pytest.mark.slow
def test_many_at_once(url, monkeypatch, capsys):
    *lines, last = printed("many_at_once.py", url, monkeypatch, capsys).splitlines()
    assert len(lines) == 16 and re.fullmatch(r"\d+ tokens", last)


@pytest.mark.slow
def test_openais_client_and_a_schema(url, monkeypatch, capsys):
    pytest.importorskip("openai")
    assert printed("openai_client.py", url, monkeypatch, capsys).strip() in (
        "{'even': True}",
        "{'even': False}",
    )


def test_a_batch(url, tmp_path):
    out = tmp_path / "answers.jsonl"
    assert run(["run-batch", str(EXAMPLES / "batch.jsonl"), "-o", str(out), "--url", url]) == 0
    assert {json.loads(line)["custom_id"] for line in out.read_text().splitlines()} == {"one", "two"}


def test_settings_in_a_file():
    asked = asked_of(dict(up.make_context("up", ["--config", str(EXAMPLES / "up.toml")]).params))
    assert asked.wishes.experts == 2 and asked.listening.served_model_name == ("nano", "code")


@pytest.mark.process
def test_offline(monkeypatch, capsys):
    WARM.address()
    patch_library(monkeypatch, forker, "subprocess", Popen=WARM.fork_server)
    assert printed("offline.py", "", monkeypatch, capsys).count("\n") >= 2


def test_every_example_is_in_the_table():
    listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
