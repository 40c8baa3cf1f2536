"""`afserve up` on a checkpoint folder with one broken file: one line with the file's name, exit code 2, at once."""

import json
import shutil
from pathlib import Path

import pytest

from afserve.launch.plan.models import CONFIGS
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
SECONDS = 120.0
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def with_value(name: str, value: object) -> bytes:
    return json.dumps({**json.loads((CONFIGS / "nano" / "config.json").read_text()), name: value}).encode()


def broken(folder: Path, file: str, data: bytes) -> None:
    for name in FILES:
        shutil.copy(CONFIGS / "nano" / name, folder)
    (folder / file).write_bytes(data)


def is_one_line_of(said: str, file: Path, complaint: str) -> None:
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert said.endswith(f"{line}\n") and "Traceback" not in said
    assert line.startswith(f"error: {file}: ") and complaint in line


@pytest.mark.parametrize(
    ("file", "data", "complaint"),
    [
        (
            "config.json",
            with_value("num_hidden_layers", 10**9),
            "num_hidden_layers: 1000000000 is not a whole number",
        ),
        (
            "config.json",
            with_value("rms_norm_eps", float("nan")),
            "rms_norm_eps: nan is not a number in [1e-20, 1]",
        ),
        ("config.json", b'{"a":' * 100_000, "nested too deeply"),
        ("generation_config.json", b'{"eos_token_id": [1, "2"]}', "eos_token_id: [1, '2'] is not a token id"),
    ],
)
def test_it_is_one_line(refused, tmp_path: Path, file: str, data: bytes, complaint: str):
    broken(tmp_path, file, data)
    code, said = refused("--model", str(tmp_path))
    assert code == 2
    is_one_line_of(said, tmp_path / file, complaint)


@pytest.mark.parametrize(
    ("file", "data", "complaint"),
    [
        ("generation_config.json", b'{"temperature": NaN}', "temperature: nan"),
        ("tokenizer.json", b"\xff{", "is not UTF-8 text"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default"}]}',
            "chat_template[0]: {'name': 'default'}",
        ),
    ],
)
def test_what_the_gateway_reads_is_one_line_too(tmp_path: Path, file: str, data: bytes, complaint: str):
    broken(tmp_path, file, data)
    done = WARM.said("up", "--port", "0", "--model", str(tmp_path))
    assert done.returncode == 2
    is_one_line_of(done.stderr, tmp_path / file, complaint)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("num_hidden_layers", 3, "num_hidden_layers is 3, but the checkpoint has layers up to 4 too"),
        (
            "quantization_config",
            {"quant_method": "awq", "bits": 4, "group_size": 32},
            "is plain bfloat16, but quantization_config of config.json says awq",
        ),
    ],
)
def test_a_config_that_its_checkpoint_contradicts_is_one_line_of_a_node(
    tmp_path: Path, name: str, value: object, complaint: str
):
    broken(tmp_path, "config.json", with_value(name, value))
    done = WARM.said("up", "--port", "0", "--model", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert complaint in done.stderr and str(tmp_path) in done.stderr and done.stderr.count("\n") == 1
