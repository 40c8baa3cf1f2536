"""Checkpoint folders as they come: shards, FP8 blocks, and everything that can be wrong with them."""

import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.local import colocated
from afserve.errors import CheckpointError
from afserve.models import tensor_files
from afserve.models.shards import INDEX, SINGLE
from afserve.models.tensor_files import MappedFiles, ReadFiles
from afserve.models.weights import Checkpoint, DummyCheckpoint

BLOCK = (128, 128)


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
    assert checkpoint.has("a.weight")
    assert not checkpoint.has("c")
    assert checkpoint.tensor("b.weight", (3,), torch.float32).dtype == torch.float32


@pytest.mark.parametrize("reads", [False, True])
def test_shards_are_opened_only_when_asked(tmp_path, reads):
    shard(tmp_path, one={"x": torch.ones(2)}, two={"y": torch.zeros(2)})
    (tmp_path / "two.safetensors").unlink()
    checkpoint = Checkpoint(tmp_path, reads=reads)
    assert checkpoint.tensor("x", (2,), torch.float32).tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"two\.safetensors: the index names this shard"):
        checkpoint.tensor("y", (2,), torch.float32)


def mapped_bytes(folder):
    """Pages in this process of mapped files below `folder`."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="counts pages as Linux tells them")
def test_what_was_read_does_not_stay_in_memory(tmp_path, monkeypatch):
    """While a tensor that is still used stays as it was."""
    monkeypatch.setattr(tensor_files, "MOST_MAPPED", 8 << 20)
    shard(tmp_path, **{f"f{i}": {f"t{i}": torch.full((1 << 20,), float(i))} for i in range(16)})
    checkpoint = Checkpoint(tmp_path)
    first = checkpoint.tensor("t0", (1 << 20,), torch.float32)
    most = 0
    for i in range(1, 16):
        assert checkpoint.tensor(f"t{i}", (1 << 20,), torch.float32).sum() == i << 20
        most = max(most, mapped_bytes(tmp_path))
    assert 4 << 20 <= most <= 17 << 20, "of 64 MiB: 8 and one more, and the first"
    assert not first.any()


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


@pytest.mark.parametrize("reads", [False, True])
def test_corrupt_and_missing_files(tmp_path, reads):
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
        Checkpoint(tmp_path, reads=reads).tensor("x", (64,), torch.float32)


def test_files_that_are_read_give_what_mapped_ones_give(tmp_path):
    """In every dtype that is stored, of every rank, by several threads; what is given is the caller's own."""
    drawn = torch.Generator().manual_seed(5)
    stored = {}
    for dtype in tensor_files._DTYPES.values():
        for shape in ((), (0,), (7,), (3, 5), (2, 3, 4)):
            numbers = torch.randint(0, 100, shape, generator=drawn)
            stored[f"{dtype}{list(shape)}"] = numbers.to(dtype)
    save_file(stored, tmp_path / SINGLE)
    mapped, read = MappedFiles(tmp_path), ReadFiles(tmp_path)
    assert [name for name in stored if not read.reads(SINGLE, name)] == [n for n in stored if "[2, 3" in n]
    names = [name for name in stored if read.reads(SINGLE, name)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: read.tensor(SINGLE, name), names * 3))
    for name, tensor in zip(names * 3, found, strict=True):
        want = mapped.tensor(SINGLE, name)
        assert tensor.dtype is want.dtype and tensor.shape == want.shape
        assert torch.equal(tensor.float(), want.float())
        tensor.zero_()
    assert torch.equal(read.tensor(SINGLE, names[2]).float(), stored[names[2]].float())


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path):
    save_file({"x": torch.ones(4096), "y": torch.ones(2)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path, reads=True)
    assert checkpoint.tensor("y", (2,), torch.float32).tolist() == [1, 1]
    os.truncate(tmp_path / SINGLE, 4096)
    with pytest.raises(CheckpointError, match="x cannot be read: the file ends"):
        checkpoint.tensor("x", (4096,), torch.float32)


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
        ReadFiles(tmp_path).tensor(SINGLE, "x")


def test_no_descriptor_outlives_the_files_that_are_read(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / SINGLE)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        Checkpoint(tmp_path, reads=True).tensor("x", (2,), torch.float32)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"x": "../x.safetensors"}}',
        '{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}',
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
    from afserve.engine.request import GenerationRequest, SamplingParams

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
