"""The file of `afserve up --models`: what becomes of a table, and one line for whatever is wrong."""

import pytest

from afserve.cli.main import run
from afserve.cli.models_file import models_of
from afserve.cli.up import asked_of, up

TWO = """
schema = 1
[[model]]
name = "a"
model = "nano"
experts = 2
kv-tokens = 4096
[[model]]
name = ["b", "c"]
model = "nano"
colocated = true
expert-dtype = "int8"
"""


def flags_of(path, *arguments):
    ctx = up.make_context("up", ["--models", str(path), *arguments])
    flags = {name: value for name, value in ctx.params.items() if name not in ("named", "write_config")}
    with ctx:
        return [asked_of(each) for each in models_of(ctx, path, flags, ())]


def written(tmp_path, text):
    path = tmp_path / "models.toml"
    path.write_text(text)
    return path


def test_each_model_has_its_own_flags(tmp_path):
    first, second = flags_of(written(tmp_path, TWO), "--threads", "1", "--max-inflight", "7")
    assert (first.listening.names("nano"), second.listening.names("nano")) == (("a",), ("b", "c"))
    assert (first.wishes.experts, first.wishes.kv_tokens, first.wishes.colocated) == (2, 4096, False)
    assert (second.wishes.experts, second.wishes.colocated) == (None, True)
    assert (first.wishes.engine.expert_dtype, second.wishes.engine.expert_dtype) == ("auto", "int8")
    assert first.wishes.threads == second.wishes.threads == 1 and first.limits == second.limits
    assert first.limits.max_inflight == 7


def test_the_command_line_comes_before_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("AFSERVE_KV_TOKENS", "512")
    first, second = flags_of(written(tmp_path, TWO), "--experts", "3")
    assert first.wishes.experts == second.wishes.experts == 3
    assert first.wishes.kv_tokens == second.wishes.kv_tokens == 512


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (TWO + "port = 8001", (), "model 2: port: is not one model's"),
        (TWO + "expert = 2", (), "model 2: expert: is not one of"),
        (TWO + "gateways = 2", (), "model 2: gateways: is not one model's"),
        (TWO + 'threads = "many"', (), "model 2: threads: 'many' is not a valid integer"),
        (TWO + "kv-copies = 99", (), "model 2: kv_copies: "),
        (TWO + "attention = 1e9", (), "models.toml: model 2: --attention: 1000000000 is outside"),
        (TWO.replace("experts = 2", "experts = 99"), (), "models.toml: model 1: --experts: 99 nodes"),
        (TWO + "spare-slots = [1]", (), "model 2: spare_slots: [1] is not a single value"),
        (TWO.replace("4096", "4096\nload-format = 'x'"), (), "model 1: load_format: "),
        ('[[model]]\nname = 3\nmodel = "nano"', (), "model 1: name: 3 is neither a text"),
        ('[[model]]\nname = " "\nmodel = "nano"', (), "model 1: name: ' ' is neither a text"),
        ('[[model]]\nname = ["a", "a"]\nmodel = "nano"', (), "model 1: name: ['a', 'a'] has a name twice"),
        ('[[model]]\nname = "a"', (), "model 1: model: is missing"),
        ("port = 1", (), "port: stands in no table"),
        ("schema = 9", (), "schema: 9 is not 1"),
        ("model = 3", (), "names no model"),
        ("", (), "names no model"),
        ("[[model", (), "Expected"),
        ('[[model]]\nmodel = "nano"\n' * 17, (), "17 models, at most 16"),
        (
            TWO,
            ("--gateways", "2"),
            "--gateways: cannot be given with --models: several models have one gateway",
        ),
        (TWO, ("--model", "nano"), "--model: cannot be given with --models: write model = in its table"),
        (TWO, ("nano",), "--model: cannot be given with --models"),
        (TWO, ("--ray",), "--ray: cannot be given with --models"),
    ],
)
def test_what_is_refused(tmp_path, capsys, text, arguments, said):
    assert run(["up", "--models", str(written(tmp_path, text)), *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert run(["up", "--models", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_names_and_memory_are_checked_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("AFSERVE_MODELS", raising=False)
    assert run(["up", "--models", str(written(tmp_path, TWO.replace('"c"', '"a"')))]) == 2
    assert "models 1 and 2 are both called 'a'" in capsys.readouterr().err
    huge = "[[model]]\nmodel = 'deepseek-v3'\nload-format = 'dummy'\nlayers = 30\nexperts = 1\n"
    assert run(["up", "--models", str(written(tmp_path, huge + TWO.partition("schema = 1")[2]))]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_the_option_is_written_too(tmp_path, capsys):
    path = written(tmp_path, TWO)
    assert run(["up", "--models", str(path), "--write-config", "-"]) == 0
    assert f'models = "{path}"' in capsys.readouterr().out
