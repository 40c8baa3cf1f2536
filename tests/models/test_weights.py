"""Checkpoint folders as they come: shards, FP8 blocks, and everything that can be wrong with them."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.errors import CheckpointError
from afserve.models import shards, tensor_files
from afserve.models.shards import INDEX, SINGLE
from afserve.models.tensor_files import TensorFiles
from afserve.models.weights import Checkpoint, DummyCheckpoint
from tests.open_files import left_open
from tests.patching import patch_library

BLOCK = (128, 128)
ODD_NAMES = ("a\0b", "\0", "", ".", "..", "/", "a/b", "./a", "a/", "\ud800", "n" * 256, "é" * 128)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_file(
        {"a.weight": torch.randn(5, 7), "b.weight": torch.randn(3).bfloat16()}, tmp_path / "model.safetensors"
    )
    return tmp_path


def shard(folder, **files):
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors")
    names = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def test_single_file(folder):
    checkpoint = Checkpoint(folder)
    assert checkpoint.has_tensor("a.weight")
    assert not checkpoint.has_tensor("c")
    assert checkpoint.tensor("b.weight", (3,), torch.float32).dtype == torch.float32


def test_shards_are_opened_only_when_asked(tmp_path):
    shard(tmp_path, one={"x": torch.ones(2)}, two={"y": torch.zeros(2)})
    (tmp_path / "two.safetensors").unlink()
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("x", (2,), torch.float32).tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"two\.safetensors: the index names this shard"):
        checkpoint.tensor("y", (2,), torch.float32)


def test_single_rows_are_read_where_they_lie(tmp_path):
    made = torch.randn(40, 6).bfloat16()
    save_file({"y": made, "z": torch.ones(3)}, tmp_path / SINGLE)
    checkpoint, numbers = Checkpoint(tmp_path), [39, 0, 7, 7]
    read = checkpoint.bytes_read
    assert torch.equal(checkpoint.picked("y", (40, 6), numbers, torch.float32), made.float()[numbers])
    assert checkpoint.bytes_read - read == 4 * 6 * 2
    with pytest.raises(CheckpointError, match=r"y has shape \(40, 6\), config.json asks for \(41, 6\)"):
        checkpoint.picked("y", (41, 6), [40], torch.float32)
    with open(tmp_path / SINGLE, "r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*"):
        checkpoint.picked("y", (40, 6), [39], torch.float32)


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="looks at what Linux says is mapped")
def test_nothing_of_a_checkpoint_is_mapped(tmp_path):
    """Of a mapped file that is cut, a look at what is gone ends the process."""
    save_file({"x": torch.ones(4096), "y": torch.ones(4, 1024)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    held = (
        checkpoint.tensor("x", (4096,), torch.float32),
        checkpoint.rows("y", (4, 1024), 1, 2, torch.float32),
    )
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    os.truncate(tmp_path / SINGLE, 0)
    assert [float(one.sum()) for one in held] == [4096, 2048]


def test_fp8_is_read_of_matrices_only(tmp_path):
    save_file({"w.bias": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w.bias is FP8 of shape \(4,\)"):
        Checkpoint(tmp_path, BLOCK).tensor("w.bias", (4,), torch.float32)


@pytest.mark.parametrize("shape", [(128, 256), (130, 257), (1, 128), (127, 1)])
def test_fp8_blocks(tmp_path, shape):
    torch.manual_seed(1)
    rows, columns = shape
    q = torch.randn(shape).clamp(-3, 3).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    save_file({"w.weight": q, "w.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    got = Checkpoint(tmp_path, BLOCK).tensor("w.weight", shape, torch.float32)
    for i in range(rows):
        for j in (0, columns // 2, columns - 1):
            assert got[i, j] == q[i, j].float() * scale[i // 128, j // 128]


def test_fp8_needs_its_scales(tmp_path):
    q = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({"w.weight": q}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight_scale_inv is missing"):
        Checkpoint(tmp_path, BLOCK).tensor("w.weight", (4, 4), torch.float32)
    with pytest.raises(CheckpointError, match="weight_block_size"):
        Checkpoint(tmp_path).tensor("w.weight", (4, 4), torch.float32)
    save_file({"w.weight": q, "w.weight_scale_inv": torch.ones(2, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"scale_inv has shape \(2, 1\)"):
        Checkpoint(tmp_path, BLOCK).tensor("w.weight", (4, 4), torch.float32)


def test_wrong_shape_and_dtype(folder):
    with pytest.raises(
        CheckpointError, match=r"a\.weight has shape \(5, 7\), config\.json asks for \(5, 8\)"
    ):
        Checkpoint(folder).tensor("a.weight", (5, 8), torch.float32)
    save_file({"i": torch.ones(2, dtype=torch.int32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"dtype torch\.int32"):
        Checkpoint(folder).tensor("i", (2,), torch.float32)


def test_corrupt_and_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="safetensors only"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Checkpoint(tmp_path)
    shard(tmp_path, one={"x": torch.ones(64)})
    (tmp_path / "one.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Checkpoint(tmp_path).tensor("x", (64,), torch.float32)


def test_tensors_are_those_that_the_library_reads(tmp_path):
    """In every dtype that is stored, of every rank, by several threads; what is given is the caller's own."""
    drawn = torch.Generator().manual_seed(5)
    stored = {}
    for dtype in tensor_files._DTYPES.values():
        for shape in ((), (0,), (7,), (3, 5), (2, 3, 4)):
            numbers = torch.randint(0, 100, shape, generator=drawn)
            stored[f"{dtype}{list(shape)}"] = numbers.to(dtype)
    save_file(stored, tmp_path / SINGLE)
    files, names, library = TensorFiles(tmp_path), list(stored), load_file(tmp_path / SINGLE)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: files.tensor(SINGLE, name), names * 3))
    for name, tensor in zip(names * 3, found, strict=True):
        want = library[name]
        assert tensor.dtype is want.dtype and tensor.shape == want.shape == files.shape(SINGLE, name)
        assert torch.equal(tensor.float(), want.float())
        for first, count in ((0, len(want)), (1, 1), (len(want), 0)) if want.dim() and len(want) else ():
            part = files.rows(SINGLE, name, first, count)
            assert torch.equal(part.float(), want[first : first + count].float())
        tensor.zero_()
    assert torch.equal(files.tensor(SINGLE, names[2]).float(), stored[names[2]].float())


def test_a_file_that_is_cut_while_it_is_served_from_is_refused_until_it_is_back(tmp_path):
    """As it is put back: in its place or under its name."""
    save_file({"x": torch.ones(4096), "y": torch.ones(2, 4096)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    checkpoint, asked = Checkpoint(tmp_path), []
    checkpoint.check_changes(lambda: bool(asked.append(1)) or (tmp_path / SINGLE).read_bytes() == whole)
    reads = (
        lambda: checkpoint.tensor("x", (4096,), torch.float32),
        lambda: checkpoint.rows("y", (2, 4096), 1, 1, torch.float32),
    )
    for _ in range(2):
        assert [float(read().sum()) for read in reads] == [4096, 4096]
        os.truncate(tmp_path / SINGLE, 4096)
        before = len(asked)
        for read in reads * 100:
            with pytest.raises(CheckpointError, match=r"was written to since this process began to read it"):
                read()
        assert len(asked) == before + 1, "the same file is not looked at a thousand times"
        (tmp_path / SINGLE).write_bytes(whole)
        assert [float(read().sum()) for read in reads] == [4096, 4096]
        os.truncate(tmp_path / SINGLE, 4096)
        (tmp_path / "copy").write_bytes(whole)
        (tmp_path / "copy").rename(tmp_path / SINGLE)


def test_a_file_that_another_one_has_replaced_is_read_as_it_was(tmp_path):
    save_file({"x": torch.ones(64)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("x", (64,), torch.float32).sum() == 64
    save_file({"x": torch.zeros(64)}, tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / SINGLE)
    assert checkpoint.tensor("x", (64,), torch.float32).sum() == 64
    (tmp_path / SINGLE).unlink()
    os.mkfifo(tmp_path / SINGLE)
    assert checkpoint.tensor("x", (64,), torch.float32).sum() == 64


@pytest.mark.parametrize("change", ["other numbers", "nothing", "a FIFO", "a folder"])
def test_what_is_put_in_the_place_of_a_cut_file_is_looked_at(tmp_path, change):
    """By name, at once, and whatever it is."""
    save_file({"x": torch.ones(64)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check_changes(lambda: (tmp_path / SINGLE).is_file() and change == "nothing there")
    checkpoint.tensor("x", (64,), torch.float32)
    os.truncate(tmp_path / SINGLE, 100)
    (tmp_path / SINGLE).unlink()
    if change == "other numbers":
        save_file({"x": torch.zeros(64)}, tmp_path / SINGLE)
    elif change == "a FIFO":
        os.mkfifo(tmp_path / SINGLE)
    elif change == "a folder":
        (tmp_path / SINGLE).mkdir()
    with pytest.raises(CheckpointError, match=SINGLE):
        checkpoint.tensor("x", (64,), torch.float32)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENXIO])
def test_a_disk_that_cannot_read_is_named_and_asked_again(tmp_path, monkeypatch, number):
    save_file({"x": torch.ones(64)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.tensor("x", (64,), torch.float32)
    with monkeypatch.context() as broken:

        def fails(*_):
            raise OSError(number, "it is broken")

        patch_library(broken, shards, "os", preadv=fails)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: it is broken \(x\)"):
            checkpoint.tensor("x", (64,), torch.float32)
    assert checkpoint.tensor("x", (64,), torch.float32).sum() == 64


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ('{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', r"'x': 8 bytes are not F32 \[3\]"),
        ('{"x":{"dtype":"F5","shape":[1],"data_offsets":[0,8]}}', "'x' has dtype 'F5', which is not known"),
        (
            '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
            "the header: 'x' is there twice",
        ),
        (
            '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "tensors 'x' and 'y' lie in the same bytes",
        ),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_by_tensor(header, said, tmp_path):
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(CheckpointError, match=said):
        TensorFiles(tmp_path).tensor(SINGLE, "x")


@pytest.mark.slow
def test_no_descriptor_outlives_the_files_that_are_read(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / SINGLE)
    for _ in range(50):
        Checkpoint(tmp_path).tensor("x", (2,), torch.float32)
    assert not left_open(set(), str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"x": "../x.safetensors"}}',
        '{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}',
        *(json.dumps({"weight_map": {"x": name}}) for name in ODD_NAMES),
    ],
)
def test_bad_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX.replace(".", r"\.")):
        Checkpoint(tmp_path)


def test_dummy_weights_are_the_same_everywhere():
    one, two = DummyCheckpoint(3), DummyCheckpoint(3)
    shape = (4, 6)
    assert torch.equal(one.tensor("q", shape, torch.bfloat16), two.tensor("q", shape, torch.bfloat16))
    assert not torch.equal(one.tensor("q", shape, torch.float32), one.tensor("k", shape, torch.float32))
    assert one.tensor("x.input_layernorm.weight", (2,), torch.float32).tolist() == [1, 1]


@pytest.mark.slow
def test_large_dummy_weights_and_codes_are_spread_alike():
    dummy, shape = DummyCheckpoint(3), (1024, 1025)
    whole, codes = dummy.tensor("q", shape, torch.bfloat16), dummy.int4("q", shape, 32)
    assert torch.equal(whole, DummyCheckpoint(3).tensor("q", shape, torch.bfloat16))
    assert torch.equal(codes.code_OI, DummyCheckpoint(3).int4("q", shape, 32).code_OI)
    assert codes.code_OI.unique().tolist() == list(range(-8, 8)) and codes.scale_OG.shape == (1024, 33)
    for made in (whole.float(), codes.dequantised()):
        assert made.std() == pytest.approx(0.02, rel=0.02) and abs(made.mean()) < 0.003


def test_fp8_checkpoint_runs(tiny_checkpoint, tmp_path):
    """A whole V3 checkpoint in DeepSeek's FP8 layout gives the logits of its de-quantised twin."""
    from afserve.config import EngineConfig
    from afserve.engine.scheduling.request import GenerationRequest, SamplingParams

    source = tiny_checkpoint("v3")
    tensors = load_file(source / "model.safetensors")
    quantised, plain = {}, {}
    for name, tensor in tensors.items():
        plain[name] = tensor
        if "_proj" in name and tensor.dim() == 2:
            scale = tensor.abs().max() / 448
            q = (tensor / scale).to(torch.float8_e4m3fn)
            shape = tuple(-(-n // 128) for n in tensor.shape)
            quantised[name], quantised[name + "_scale_inv"] = q, scale.expand(shape).contiguous()
            plain[name] = q.float() * scale
        else:
            quantised[name] = tensor
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(quantised, tmp_path / "model.safetensors")
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    tokens = []
    for path in (tmp_path, tmp_path / "plain"):
        node = colocated(
            ModelSource(str(path), "fp8", dtype="float32"), EngineConfig(64, 8, block_size=8, micro_batches=1)
        )
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        node.submit(GenerationRequest(0, (5, 6, 7, 8), params))
        tokens.append([t for _ in range(30) for event in node.step() for t in event.token_ids])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 20
