"""Vocabularies of real models that lie in a checkout of llama.cpp (LLAMA_CPP names it): the tokens that stand beside
them. Without one these tests are skipped; `test_llama_peer.py` asks llama.cpp itself.

Qwen's tokenizers compose characters first and llama.cpp does not, so their strings are composed ones.
"""

import os
import unicodedata
from pathlib import Path

import pytest

from afserve.gguf.metadata import Metadata
from afserve.gguf.splitting import SPLITTINGS
from afserve.gguf.vocabulary import vocabulary_of
from afserve.models.shards import ShardFile

LLAMA = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
NAMES = (
    "command-r", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact",
    "starcoder",
)  # fmt: skip
BETWEEN = "\n__ggml_vocab_test__\n"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (LLAMA / "models").is_dir(), reason="LLAMA_CPP names no llama.cpp"),
]


def file_of(name):
    return LLAMA / "models" / f"ggml-vocab-{name}.gguf"


def tokenizer_of(name):
    with ShardFile(file_of(name)) as file:
        metadata = Metadata(file.gguf_header().metadata, name)
    rule = SPLITTINGS.get(metadata.string("tokenizer.ggml.pre", "default"))
    made = vocabulary_of(metadata, len(metadata.texts("tokenizer.ggml.tokens"))).tokenizer
    return made, rule is not None and rule.composed


def is_composed(text):
    return unicodedata.is_normalized("NFC", text)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_that_stand_beside_them(name):
    made, composed = tokenizer_of(name)
    with open(f"{file_of(name)}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split(BETWEEN)
    lines = Path(f"{file_of(name)}.out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        if is_composed(text) or not composed:
            assert made.encode(text, add_special_tokens=False).ids == [int(each) for each in line.split()], (
                text
            )
