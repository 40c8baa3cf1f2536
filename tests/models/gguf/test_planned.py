"""A GGUF file is a model for the planner too: its layers are those of the folder that it was made of."""

import json
from dataclasses import replace

import pytest

from afserve.cli.main import run
from afserve.cli.plan.catalog import load_model
from tests.models.gguf.writing import convert


@pytest.mark.slow
def test_a_file_has_the_layers_of_its_folder(checkpoint, tmp_path, capsys):
    for name in ("qwen3", "mixtral"):
        file = convert(checkpoint(name), tmp_path / f"{name}.gguf")
        folder, planned = load_model(str(checkpoint(name))), load_model(str(file))
        assert planned.name == name and replace(planned, name=folder.name, source=folder.source) == folder
    assert run(["plan", "--model", str(file), "--pool", "rtx-5090=1", "--context", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "mixtral"


def test_a_file_that_is_none_is_named(tmp_path, capsys):
    file = tmp_path / "odd.gguf"
    file.write_bytes(b"no model at all, whatever its name says")
    assert run(["plan", "--model", str(file), "--pool", "rtx-5090=1"]) == 2
    assert str(file) in capsys.readouterr().err
