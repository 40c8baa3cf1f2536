"""What a checkpoint folder says about its tokens, and folders that say it badly."""

import json

import pytest

from afserve.errors import CheckpointError, RequestError
from afserve.tokens.tokenizer import BYTE_OF, Tokenizer, eos_ids, special_tokens


def test_no_tokenizer_says_how_to_make_one(tmp_path):
    with pytest.raises(CheckpointError, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 5}', "\x00"])
def test_a_file_that_is_no_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_in_the_file_do_not_count(checkpoint, tmp_path):
    body = json.loads((checkpoint / "tokenizer.json").read_text())
    body["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    body["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    plain = Tokenizer.from_folder(checkpoint)
    text = "the quick brown fox jumps"
    assert Tokenizer.from_folder(tmp_path).encode(text) == plain.encode(text)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"eos_token_id": [5, 6]}}, (5, 6)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7]}}, (7,)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": None}}, (5,)),
        ({"config.json": {"text_config": {"eos_token_id": 8}}}, (8,)),
        ({"config.json": {"eos_token_id": 0}}, (0,)),
    ],
)
def test_ids_that_end_a_text(tmp_path, files, ids):
    for name, body in files.items():
        (tmp_path / name).write_text(json.dumps(body))
    assert eos_ids(tmp_path) == ids


def test_the_tokenizer_knows_the_end_when_no_config_does(checkpoint, tmp_path):
    (tmp_path / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    assert eos_ids(tmp_path) == (1,)


def test_special_tokens_in_either_form(checkpoint):
    assert special_tokens(checkpoint) == {"bos_token": "<s>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        eos_ids(tmp_path)


def test_bytes_and_ids(tokenizer):
    assert sorted(BYTE_OF.values()) == list(range(256))
    ids = tokenizer.encode("naïve 😀<|end|>")
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == "naïve 😀<|end|>"
    assert tokenizer.token(399) == "" and tokenizer.token_bytes(399) == b""
    assert tokenizer.token_id("<|end|>") == 1 and tokenizer.token_id("none such") is None


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800")
