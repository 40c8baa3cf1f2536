"""Tokenizers out of GGUF files against those that they were made of: merges of byte pairs against the library with each
splitting rule, SentencePiece's pieces against a plain rendering of its algorithm."""

import json
from array import array
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, trainers

from afserve.errors import CheckpointError
from afserve.gguf.metadata import Metadata
from afserve.gguf.splitting import SPLITTINGS
from afserve.gguf.vocabulary import vocabulary_of
from afserve.models.gguf.folder import templates_of
from afserve.tokens.split_patterns import is_quick
from afserve.tokens.tokenizer import BYTE_OF

TEXTS = [
    "The THE the don't DON'T it's 12345 3.14  and\n\n  def f(x):\n\treturn x+1 # naïve",
    "日本語のテキスト、中文字符。 한국어 русский текст Ελληνικά العربية",
    "emoji 🚀🦙 tabs\t\tspaces    end \r\n\r\n x_y CamelCase HTMLParser http://a.b/c?d=e",
]
PIECES = [*"aeT1 \n\t'é中.,🚀", "the", "don't", "  ", "e\u0301", "1234"]
SPECIAL = ["<|begin|>", "<|im_end|>"]
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES)).map("".join))


def metadata(**more):
    """As a header would have it: lists of numbers are arrays."""
    listed = {
        key: array("f" if isinstance(value[0], float) else "i", value)
        for key, value in more.items()
        if isinstance(value, list) and not isinstance(value[0], str)
    }
    values = {f"tokenizer.ggml.{key}": value for key, value in (more | listed).items()}
    return Metadata({"general.architecture": "x", **values}, "file.gguf")


def trained(rule):
    """A tokenizer with the rule's own splits: its tokens in order and its merges too."""
    made = Library(models.BPE(ignore_merges=rule.whole))
    made.pre_tokenizer, made.decoder = rule.pre_tokenizer(), decoders.ByteLevel()
    if rule.normalizer() is not None:
        made.normalizer = rule.normalizer()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=SPECIAL, initial_alphabet=sorted(BYTE_OF)
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    model = json.loads(made.to_str())["model"]
    return made, sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"]


@pytest.fixture(
    scope="module", params=["gpt-2", "llama-bpe", "qwen2", "deepseek-v3", "gpt-4o", "glm4", "deepseek-llm"]
)
def pair(request):
    made, tokens, merges = trained(SPLITTINGS[request.param])
    said = metadata(
        model="gpt2",
        pre=request.param,
        tokens=[*tokens, "[PAD]"],
        token_type=[*(3 if token in SPECIAL else 1 for token in tokens), 5],
        merges=[" ".join(merge) for merge in merges],
        bos_token_id=0,
        add_bos_token=False,
    )
    return made, vocabulary_of(said, len(tokens) + 1)


@given(text=texts)
@example(text="".join(TEXTS))
@example(text="a <|im_end|> b<|begin|>")
def test_byte_pairs(pair, text):
    made, got = pair
    assert got.tokenizer.encode(text).ids == made.encode(text).ids
    assert got.tokenizer.encode(text).ids == Library.from_str(got.tokenizer.to_str()).encode(text).ids


def test_ends_and_tokens_that_are_not_used(pair):
    """`<|im_end|>` ends an answer by its name."""
    _, got = pair
    assert got.special == {"bos_token": "<|begin|>"} and got.ends == (1,)
    assert got.tokenizer.id_to_token(1) == "<|im_end|>" and "[PAD]" not in got.tokenizer.get_vocab()


@pytest.mark.parametrize("name", SPLITTINGS)
def test_rules_take_little_time(name):
    assert all(map(is_quick, SPLITTINGS[name].expressions))


def sentence_pieces():
    """Characters, words of them with scores of their own, and all bytes."""
    words = [
        "▁t",
        "▁the",
        "he",
        "the",
        "▁a",
        "an",
        "▁an",
        "▁▁",
        "in",
        "ing",
        "▁in",
        "ed",
        "▁don",
        "12",
        "中文",
        "é",
    ]
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyzT'.,1234中文é", *"".join(words)})
    bytes_256 = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_256, *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [
        *[0.0] * 259,
        *(-float(rank) for rank in range(len(words))),
        *(-1000.0 - n for n in range(len(letters))),
    ]
    return tokens, kinds, scores


def as_sentence_piece(text, tokens, scores):
    """The best pair of neighbours becomes one until there is none; what is no token is spelled in bytes."""
    ids, pieces = {token: at for at, token in enumerate(tokens)}, list(text.replace(" ", "▁"))
    if text:
        pieces.insert(0, "▁")
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    found = []
    for piece in pieces:
        spelled = [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        found += [ids[piece]] if piece in ids else spelled
    return found


SPM_TOKENS, SPM_KINDS, SPM_SCORES = sentence_pieces()
SPM = vocabulary_of(
    metadata(
        model="llama", tokens=SPM_TOKENS, token_type=SPM_KINDS, scores=SPM_SCORES, bos_token_id=1, eos_token_id=2,
        unknown_token_id=0,
    ),
    len(SPM_TOKENS),
)  # fmt: skip


@given(text=texts.filter(lambda text: "<" not in text))
@example(text=" the  thing don't 1234 中文 🚀")
def test_sentence_pieces(text):
    got = SPM.tokenizer.encode(text)
    assert got.ids == [1, *as_sentence_piece(text, SPM_TOKENS, SPM_SCORES)]
    assert SPM.tokenizer.decode(got.ids) == text
    assert SPM.special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} and SPM.ends == (2,)


def test_a_template_with_tools_and_one_without():
    said = Metadata(
        {
            "general.architecture": "x",
            "tokenizer.chat_template": "a",
            "tokenizer.chat_template.tool_use": "b",
        },
        "f",
    )
    assert templates_of(said) == {
        "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    }
    assert templates_of(Metadata({"general.architecture": "x"}, "f")) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": []}, "has 0 tokens, the embedding has 313 rows"),
        ({"scores": [0.0]}, "has 1 items for"),
        ({"bos_token_id": -1}, "bos_token_id: -1 is no id"),
        ({"add_bos_token": 1}, "add_bos_token: 1 is neither true nor false"),
    ],
)
def test_what_is_wrong_is_named(change, why):
    plain = {
        "model": "llama",
        "tokens": SPM_TOKENS,
        "token_type": SPM_KINDS,
        "scores": SPM_SCORES,
        "bos_token_id": 1,
    }
    said = {key: value for key, value in (plain | change).items() if value != []}
    with pytest.raises(CheckpointError, match=why):
        vocabulary_of(metadata(**said), len(SPM_TOKENS))
