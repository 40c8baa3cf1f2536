"""SentencePiece's tokenizer.model: the tokens of a GGUF file with the same pieces, and of its own library where that is
installed; damaged files are one line each."""

import json
import shutil
import struct

import pytest

from afserve.errors import CheckpointError
from afserve.gguf.piece_file import read_pieces
from afserve.launch.plan.models import CONFIGS, find_model
from afserve.models.gguf.pieces_folder import unfold_pieces
from afserve.tokens.tokenizer import Tokenizer
from tests.models.gguf.strings import strings
from tests.models.gguf.test_vocabulary import SPM, SPM_KINDS, SPM_SCORES, SPM_TOKENS

BPE, UNIGRAM = 2, 1


def varint(value):
    made = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def field(number, value):
    """Of a message: bytes, a float of four bytes, or a whole number."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def model_file(kind=BPE, unknown=0, normalizer=(), pieces=None):
    """As SentencePiece saves it; `normalizer` are fields in addition, in which later ones count."""
    listed = pieces or zip(SPM_TOKENS, SPM_SCORES, SPM_KINDS, strict=True)
    parts = [
        field(1, field(1, text.encode()) + field(2, score) + field(3, type_)) for text, score, type_ in listed
    ]
    trainer = field(3, kind) + field(35, 1) + field(40, unknown) + field(41, 1) + field(42, 2) + field(43, -1)
    normal = field(1, b"identity") + field(3, 1) + field(4, 0) + b"".join(normalizer)
    return b"".join([*parts, field(2, trainer), field(3, normal)])


def folder_with(path, raw, **asked):
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(raw)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", **asked})
    )
    return path


def test_the_tokens_of_a_gguf_file_with_the_same_pieces(tmp_path):
    made = Tokenizer.from_folder(unfold_pieces(folder_with(tmp_path / "m", model_file()), tmp_path / "to"))
    for text in strings(300):
        assert made.encode(text) == SPM.tokenizer.encode(text).ids
    assert made.special == {"bos_token": "<s>", "eos_token": "</s>"}


def test_settings_beside_it(tmp_path):
    """What texts begin and end with, tokens that follow the pieces, and texts without a space in front."""
    pieces = {row[0]: row for row in zip(SPM_TOKENS, SPM_SCORES, SPM_KINDS, strict=True)}.values()
    size = len(pieces)
    more = {str(size + i): {"content": f"<|{i}|>", "special": i == 0} for i in range(2)}
    asked = {
        "add_bos_token": False,
        "add_eos_token": True,
        "added_tokens_decoder": {"0": {"content": "<unk>"}, **more},
    }
    folder = folder_with(tmp_path / "m", model_file(normalizer=[field(3, 0)], pieces=pieces), **asked)
    made = Tokenizer.from_folder(unfold_pieces(folder, tmp_path / "to"))
    assert made.encode("the<|1|><|0|>") == [made.token_id("the"), size + 1, size, 2]
    assert made.decode([size, size + 1]) == "<|1|>"
    more[str(size + 5)] = {"content": "<|far|>"}
    folder = folder_with(tmp_path / "m", model_file(pieces=pieces), added_tokens_decoder=more)
    with pytest.raises(CheckpointError, match=f"'<|far|>' has id {size + 5}, after tokenizer.model and"):
        unfold_pieces(folder, tmp_path / "to")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (model_file(UNIGRAM), "its model is no BPE, which is not read from this file; save tokenizer.json"),
        (model_file(normalizer=[field(2, b"map")]), "it changes characters first"),
        (model_file(normalizer=[field(4, 1)]), "it removes spaces"),
        (model_file(unknown=9999), "unknown_token_id: 9999 is no id"),
        (b"", "it has no pieces"),
        (field(1, field(1, b"\xff")), "a piece is not UTF-8"),
        (field(1, field(1, 5)), "a piece is no text"),
        (field(1, b"\x0a\xff\xff\xff\xff\x7f"), "a field would have 34,359,738,367 bytes, 0 are left"),
        (b"\x0b", "a field of a type 3"),
        (b"\xff" * 12, "a number has more than 10 bytes"),
        (b"\x80", "it ends within a number"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path, raw, why):
    with pytest.raises(CheckpointError) as caught:
        unfold_pieces(folder_with(tmp_path / "m", raw), tmp_path / "to")
    assert why in caught.value.message and "\n" not in caught.value.message
    assert (
        caught.value.message.startswith(str(tmp_path / "m" / "tokenizer.model"))
        and caught.value.exit_code == 2
    )


@pytest.mark.slow
def test_any_cut_is_one_line_or_harmless():
    raw = model_file()
    for size in range(0, len(raw), 7):
        try:
            read_pieces(raw[:size], "file", {})
        except CheckpointError as error:
            assert error.message.startswith("file: ") and "\n" not in error.message


def test_a_folder_without_tokenizer_json(tmp_path, caplog):
    folder = folder_with(tmp_path / "model", model_file())
    for name in ("config.json", "model.safetensors"):
        shutil.copy(CONFIGS / "nano" / name, folder)
    found = find_model(str(folder), tmp_path / "scratch")
    assert found.weights and (found.tokenizer / "tokenizer.json").is_file() and found.tokenizer != folder
    found.warn_of_tokenizer()
    assert not caplog.records
    (folder / "tokenizer.model").unlink()
    find_model(str(folder), tmp_path / "scratch").warn_of_tokenizer()
    assert "has no tokenizer.json" in caplog.text


@pytest.mark.long
def test_the_tokens_of_its_own_library(tmp_path):
    """Of a model that the library trains, on 10,000 strings."""
    library = pytest.importorskip("sentencepiece", reason="SentencePiece's library is the oracle")
    texts = strings(3000, seed=1)
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in texts if text.strip()]), model_prefix=str(tmp_path / "trained"),
        model_type="bpe", vocab_size=4000, byte_fallback=True, character_coverage=0.98, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
    )  # fmt: skip
    raw = (tmp_path / "trained.model").read_bytes()
    made = Tokenizer.from_folder(
        unfold_pieces(folder_with(tmp_path / "m", raw, add_bos_token=False), tmp_path / "to")
    )
    oracle = library.SentencePieceProcessor(model_proto=raw)
    assert [made.encode(text) for text in strings(10_000)] == [
        oracle.encode(text) for text in strings(10_000)
    ]
