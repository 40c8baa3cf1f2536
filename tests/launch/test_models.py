"""What is found by a model's name: whose tokenizer reads its texts, and what is said of that."""

import pytest

from afserve.launch.models import CONFIGS, find_model

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
