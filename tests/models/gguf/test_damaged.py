"""GGUF files that are cut, mangled or lie about themselves: one line each, soon and in little memory."""

import os
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import ModelSource
from afserve.engine.build import colocated, spec_of
from afserve.errors import CheckpointError, ConfigError
from afserve.launch.plan.models import find_model
from afserve.models.gguf.folder import read_model, unfold
from tests.engine.driving import config
from tests.models.gguf.writing import convert, described, letters, q4_0, q8_0, renamed, stored, write

MOST_MEMORY = 8 << 20  # bytes; the file has 0.3 MB
NOT_UTF8 = b"\xff\xfe"


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    return convert(checkpoint("qwen3"), tmp_path_factory.mktemp("whole") / "whole.gguf").read_bytes()


def refusal(path):
    """The line that it is refused with."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_model(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert "\n" not in caught.value.message and len(caught.value.message) < 600
    assert caught.value.message.startswith(str(path)) and caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_any_damage_is_one_line_or_harmless(whole, tmp_path_factory, data):
    """A few bytes of the header become others, or the file is cut."""
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    mangled = bytearray(whole)
    header = whole.index(b"output_norm.weight") + 64
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, header))
        raw = data.draw(
            st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f", b"\x80", struct.pack("<Q", 1 << 40)])
        )
        mangled[at : at + len(raw)] = raw
    if data.draw(st.booleans()):
        mangled = mangled[: data.draw(st.integers(0, len(mangled) - 1))]
    path.write_bytes(mangled)
    tracemalloc.start()
    try:
        read_model(path)
    except CheckpointError as error:
        assert "\n" not in error.message and len(error.message) < 600
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_MEMORY


@pytest.mark.parametrize("size", [0, 3, 4, 11, 24, 500, 4000, 100_000])
def test_a_file_that_was_cut(whole, tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:size])
    assert "not a whole GGUF file" in refusal(path)


@pytest.mark.parametrize(
    ("at", "raw", "why"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 1 << 60), "1,152,921,504,606,846,976 tensors"),
        (16, struct.pack("<Q", 1 << 32), "4,294,967,296 keys"),
        (24, struct.pack("<Q", 1 << 62), "a text at byte 32"),
        (32, NOT_UTF8, "is not UTF-8"),
    ],
)
def test_counts_and_lengths_that_lie(whole, tmp_path, at, raw, why):
    path = tmp_path / "lies.gguf"
    path.write_bytes(whole[:at] + raw + whole[at + len(raw) :])
    assert why in refusal(path)


def changed(checkpoint, path, change):
    folder = checkpoint("qwen3")
    metadata, tensors = (
        {**described(folder), **letters(211)},
        {n: stored(x) for n, x in renamed(folder).items()},
    )
    change(metadata, tensors)
    return write(path, metadata, tensors)


def replaced(number, shape, size):
    return lambda metadata, tensors: tensors.update({"blk.0.attn_q.weight": (number, shape, bytes(size))})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m, t: m.pop("qwen3moe.block_count"), "qwen3moe.block_count: missing"),
        (lambda m, t: m.update({"qwen3moe.block_count": "three"}), "qwen3moe.block_count: 'three' is not one"),
        (lambda m, t: m.update({"qwen3moe.block_count": 0}), "num_hidden_layers"),
        (lambda m, t: m.update({"qwen3moe.embedding_length": 1 << 31}), "hidden_size"),
        (lambda m, t: m.update({"general.architecture": "mamba"}), "general.architecture 'mamba' is not supported"),
        (lambda m, t: m.update({"general.alignment": 3}), "general.alignment: 3"),
        (lambda m, t: m.update({"tokenizer.ggml.model": "t5"}), "supported: gpt2, llama"),
        (lambda m, t: m.update({"tokenizer.ggml.pre": "runes"}), "tokenizer.ggml.pre: 'runes' is not supported"),
        (lambda m, t: m.update({"tokenizer.ggml.merges": ["t", "h h"]}), "tokenizer.ggml.merges: 't'"),
        (lambda m, t: m.update({"tokenizer.ggml.tokens": ["a"] * 999}), "has 999 tokens"),
        (lambda m, t: m.update({"tokenizer.ggml.token_type": [1]}), "has 1 items"),
        (lambda m, t: m.update({"tokenizer.ggml.eos_token_id": 4000}), "eos_token_id: 4000 is no id"),
        (lambda m, t: t.pop("token_embd.weight"), "token_embd.weight is missing"),
        (lambda m, t: t.pop("blk.2.ffn_up_exps.weight"), "blk.2.ffn_up_exps.weight is missing, by the metadata"),
        (lambda m, t: m.update({"qwen3moe.block_count": 4000}), "blk.3.attn_norm.weight is missing"),
        (lambda m, t: m.update({"qwen3moe.embedding_length": 4096}), "by the metadata (211, 4096)"),
        (lambda m, t: m.update({"qwen3moe.expert_feed_forward_length": 1 << 20}), "by the metadata (7, 1048576, 64)"),
        (lambda m, t: m.update({"qwen3moe.expert_count": 8}), "has shape (7, 32, 64), by the metadata (8, 32, 64)"),
        (lambda m, t: t.update({"blk.0.ffn_gate.2.weight": t["output_norm.weight"]}), "is none that afserve knows"),
        (replaced(16, (96, 64), 10), "ggml's type 16"),
        (replaced(0, (1 << 20, 1 << 20, 1 << 20), 10), "does not fit"),
        (replaced(0, (96, 0), 10), "does not fit"),
        (replaced(8, (96, 40), 10), "rows of 40 numbers, Q8_0 has blocks of 32"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(checkpoint, tmp_path, change, why):
    assert why in refusal(changed(checkpoint, tmp_path / "wrong.gguf", change))


def test_parts(checkpoint, tmp_path):
    """Tensors of the second half in a file of their own; any part leads to all."""
    folder = checkpoint("qwen3")
    tensors = {name: stored(x) for name, x in renamed(folder).items()}
    names = sorted(tensors)
    first, second = (tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    metadata = {**described(folder), **letters(211), "split.count": 2}
    write(first, metadata, {name: tensors[name] for name in names[::2]})
    write(second, {"split.no": 1}, {name: tensors[name] for name in names[1::2]})
    for part in (first, second):
        made = unfold(part, tmp_path / "folder")
        assert sorted(path.name for path in made.glob("*.gguf")) == [first.name, second.name]
        assert read_model(part).rows.keys() == tensors.keys()
    write(second, {"split.no": 1}, {name: tensors[name] for name in names[:]})
    assert "is in m-00001-of-00002.gguf too" in _said(first)
    os.unlink(second)
    assert "no such file; m-00001-of-00002.gguf is one of 2 parts" in _said(first)


def _said(path):
    with pytest.raises(CheckpointError) as caught:
        read_model(path)
    return caught.value.message


def test_a_tensor_of_another_shape_is_named_by_who_reads_it(checkpoint, tmp_path):
    """With the file's own path, not that of the link to it."""
    path = changed(checkpoint, tmp_path / "other.gguf", replaced(0, (90, 64), 4 * 90 * 64))
    source = ModelSource(str(unfold(path, tmp_path / "folder")), "other")
    with pytest.raises(CheckpointError) as caught:
        colocated(source, config())
    assert caught.value.message == (
        f"{path}: blk.0.attn_q.weight has shape (90, 64), the metadata asks for (96, 64)"
    )


def test_a_folder_with_files_alone(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"it has 1 GGUF file\(s\): give one, such as m.gguf"):
        find_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("", ""),
        ("ffn_up_exps", ": 6 tensors such as blk.0.ffn_"),
        ("ffn_down_exps", ""),
        ("ffn_up_exps in floats", ": 6 tensors such as blk.0.ffn_"),
    ],
)
def test_what_is_dequantised_is_said(checkpoint, tmp_path, caplog, odd, said):
    """Gate and up of experts are where they are stored in two ways; nothing else of these is."""

    def store(name, x):
        if x.dim() < 2 or "ffn_gate_inp" in name or (odd.endswith("floats") and odd.split()[0] in name):
            return stored(x)
        return q4_0(x)[0] if odd and odd in name else q8_0(x)[0]

    made = unfold(convert(checkpoint("qwen3"), tmp_path / "q.gguf", store), tmp_path / "folder")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)
    for line in lines:
        assert line.startswith("q.gguf: ") and said in line
        assert "while it is loaded; all else stays as it is stored where the native library computes" in line
    wanted = {
        "": 8.5,
        "ffn_up_exps": 16.0,
        "ffn_down_exps": (8.5 * 2 + 4.5) / 3,
        "ffn_up_exps in floats": 32.0,
    }
    assert spec_of(ModelSource(str(made), "q")).quantization.expert_bits == wanted[odd]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"--model .*x\.gguf: no such file"):
        find_model(str(tmp_path / "x.gguf"), tmp_path)
