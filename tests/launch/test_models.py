"""What is found by a model's name: whose tokenizer reads its texts, and what is said of that."""

import os

import pytest

from afserve.cli.main import run
from afserve.errors import CheckpointError
from afserve.families.table import load_spec
from afserve.launch.plan.models import CONFIGS, find_model

CONFIG = (CONFIGS / "nano" / "config.json").read_text()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["model.safetensors"], "has no tokenizer.json: texts are read and written with that of nano"),
        (
            ["model.safetensors", "tiktoken.model"],
            "has no tokenizer.json (tiktoken.model is not read): texts",
        ),
        (["model.safetensors", "tokenizer.json"], ""),
        ([], ""),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_no_secret(files, said, tmp_path, caplog):
    (tmp_path / "config.json").write_text(CONFIG)
    for name in files:
        (tmp_path / name).write_bytes(b"")
    find_model(str(tmp_path), tmp_path).warn_of_tokenizer()
    assert said in caplog.text and bool(said) == bool(caplog.records)
    assert "\n" not in caplog.text.rstrip("\n")


def _fifo(path):
    os.mkfifo(path)


def _unreadable(path):
    path.write_text("{}")
    path.chmod(0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_fifo, "is not a plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a plain file"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "no such file"),
        (lambda path: path.symlink_to(path.name), "cannot be read"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        pytest.param(
            _unreadable,
            "cannot be read: Permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything"),
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_not_taken_for_none(make, said, tmp_path, caplog):
    """With random weights, of which nobody warns, the bundled one will do."""
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"")
    make(tmp_path / "tokenizer.json")
    found = find_model(str(tmp_path), tmp_path)
    assert found.tokenizer == CONFIGS / "nano"
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: {said}"):
        found.warn_of_tokenizer()
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "method", "planned"),
    [
        ("deepseek-v3", "fp8", "weights fp8 as published, cache"),
        ("gpt-oss-20b", "mxfp4", "weights fp4, attention weights bf16 as published, cache"),
        ("mixtral-8x7b", "", "weights fp8, cache"),
    ],
)
def test_a_shape_says_how_its_weights_are_published(name, method, planned, tmp_path, capsys):
    """Random weights have the bits of [config]; what a plan counts, and what is said to be needed, are those."""
    found = find_model(name, tmp_path)
    spec = load_spec(found.folder)
    stored = found.published(spec)
    how = "fp8" if stored.in_fp8_blocks else stored.quantization.layout if stored.quantization else ""
    assert (found.stored, how) == (method, method) and spec.fp8_block is spec.quantization is None
    assert run(f"plan --model {name} --pool h200=16 --kind afd".split()) == 0
    assert planned in capsys.readouterr().out
