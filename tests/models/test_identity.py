"""Two copies of a checkpoint: what makes them the same, what does not, and what it costs to know."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from afserve.config import ModelSource
from afserve.digest_cache import DigestCache
from afserve.errors import CheckpointError
from afserve.models import identity as identity_module
from afserve.models import shards, tally
from afserve.models.identity import identify, is_full, role_of, weights_of
from afserve.models.shards import INDEX, SINGLE, ShardFile
from tests.patching import patch_library
from tests.work import Calls

ROLES = ("attention", "expert")
NORM, QUERY = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.experts.1.up_proj.weight"
SHARED = "model.layers.0.mlp.shared_experts.up_proj.weight"


def tensors():
    draw = np.random.default_rng(0)
    shapes = {NORM: (64,), QUERY: (128, 96), UP: (200, 64), SHARED: (20, 64), "lm_head.weight": (300, 64)}
    shapes |= {f"model.layers.0.mlp.experts.{e}.down_proj.weight": (64, 90) for e in range(3)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    save_file(tensors(), made / SINGLE)
    for name, text in (("tokenizer.json", '{"a": 1}'), ("generation_config.json", "{}")):
        (made / name).write_text(text)
    return made


def of(folder, roles=ROLES, cache=None, **more):
    return identify(ModelSource(str(folder), "m"), roles, cache or DigestCache(None), **more)


def differing(one, other):
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def rewrite(folder, change):
    found = load_file(folder / SINGLE)
    change(found)
    save_file(found, folder / SINGLE)


def test_roles_read_different_tensors(folder):
    whole = of(folder)
    assert whole["attention weights"].endswith("(4 tensors of F32)")
    assert whole["expert weights"].endswith("(4 tensors of F32)")
    assert of(folder, ("expert",)) == {"expert weights": whole["expert weights"]}
    assert whole["chat_template.jinja"] == "absent" and len(whole["tokenizer.json"]) == 16
    assert (role_of(UP), role_of(SHARED), role_of(NORM)) == ("expert", "attention", "attention")
    table = "model.ngram_embeddings"
    assert (
        role_of(f"{table}.embedders.3.weight") == "expert"
        and role_of(f"{table}.post_projs.3.weight") == "attention"
    )


def scaled(name):
    def change(found):
        found[name] = found[name] * 1.5

    return change


def as_half(found):
    found[QUERY] = found[QUERY].astype(np.float16)


def turned(found):
    found[QUERY] = found[QUERY].reshape(96, 128)


def exchanged(found):
    first, second = (f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (0, 1))
    found[first], found[second] = found[second], found[first]


@pytest.mark.parametrize(
    ("change", "thing"),
    [
        (scaled(UP), "expert weights"),
        (scaled(NORM), "attention weights"),
        (scaled(QUERY), "attention weights"),
        (scaled(SHARED), "attention weights"),
        (as_half, "attention weights"),
        (turned, "attention weights"),
        (exchanged, "expert weights"),
        (lambda found: found.pop(NORM), "attention weights"),
    ],
    ids=["expert", "norm", "query", "shared", "dtype", "shape", "exchanged", "missing"],
)
def test_what_a_role_reads_is_what_differs(folder, change, thing):
    before = of(folder, full=True)
    rewrite(folder, change)
    assert differing(before, of(folder, full=True)) == {thing, f"{thing} (all bytes)"}


@pytest.mark.parametrize("name", identity_module.TEXT_FILES)
def test_tokenizer_files_are_named(folder, name):
    before = of(folder)
    (folder / name).write_text('{"b": 2}')
    assert differing(before, of(folder)) == {name}


def split(folder, files):
    """The same tensors in shards with an index."""
    found = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map = {name: f"part-{number % files}.safetensors" for number, name in enumerate(sorted(found))}
    for file in set(weight_map.values()):
        save_file({n: found[n] for n in found if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("files", [1, 2, 5])
def test_files_and_order_do_not_matter(folder, files):
    before = of(folder, full=True)
    split(folder, files)
    assert of(folder, full=True) == before


def test_the_index_decides_which_tensor_counts(folder):
    weight_map = split(folder, 2)
    before = of(folder)
    other = next(f for f in ("part-0.safetensors", "part-1.safetensors") if f != weight_map[UP])
    found = load_file(folder / other)
    found[UP] = tensors()[UP] * 2
    save_file(found, folder / other)
    assert of(folder) == before  # a second copy that nobody reads
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, UP: other}}))
    assert differing(before, of(folder)) == {"expert weights"}


def test_a_role_needs_its_own_shards_only(folder):
    weight_map = split(folder, 1)
    found = load_file(folder / "part-0.safetensors")
    for role in ROLES:
        save_file({n: t for n, t in found.items() if role_of(n) == role}, folder / f"{role}.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {n: f"{role_of(n)}.safetensors" for n in weight_map}})
    )
    whole = of(folder)
    (folder / "expert.safetensors").unlink()
    assert of(folder, ("attention",))["attention weights"] == whole["attention weights"]
    with pytest.raises(CheckpointError, match=r"expert\.safetensors: cannot be read: No such file"):
        of(folder, ("expert",))


@pytest.mark.slow
def test_one_number_between_samples_is_seen_in_all_bytes_only(folder):
    """Four runs of 16 numbers of 19,200 are in the samples."""
    with ShardFile(folder / SINGLE) as file:
        begin = next(t.begin for t in file.tensors() if t.name == "lm_head.weight")
    before, complete, seen = of(folder), of(folder, full=True), 0
    with open(folder / SINGLE, "r+b", buffering=0) as file:
        for place in range(0, 19_200, 6):
            file.seek(begin + 4 * place)
            old = file.read(1)
            _write(file, begin + 4 * place, bytes([old[0] ^ 1]))
            seen += bool(differing(before, of(folder)))
            if place % 6000 == 0:
                assert "attention weights (all bytes)" in differing(complete, of(folder, full=True))
            _write(file, begin + 4 * place, old)
    assert 4 <= seen <= 64 / 6 + 6


def _write(file, place, data):
    file.seek(place)
    file.write(data)


def test_dummy_weights_are_their_seed(tmp_path):
    def of_seed(seed, full=False):
        source = ModelSource(str(tmp_path), "m", load_format="dummy", seed=seed)
        return identify(source, ROLES, DigestCache(None), full=full)

    assert of_seed(0) == of_seed(0)
    assert differing(of_seed(0), of_seed(1)) == {"attention weights", "expert weights"}
    assert "seed 7" in of_seed(7)["expert weights"]
    assert is_full(of_seed(0, full=True)) and not is_full(of_seed(0))


def test_a_second_look_opens_no_file(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    before = of(folder, cache=DigestCache(cache, 0.0))

    def opened(self):
        raise AssertionError(f"{self.path} was opened")

    monkeypatch.setattr(ShardFile, "__enter__", opened)
    assert of(folder, cache=DigestCache(cache, 0.0)) == before
    os.utime(folder / SINGLE)
    with pytest.raises(AssertionError, match="was opened"):
        of(folder, cache=DigestCache(cache, 0.0))


def test_all_bytes_never_come_from_the_cache(folder, tmp_path, monkeypatch):
    cache, done, read, real = tmp_path / "cache", [], [], os.pread
    before = of(folder, cache=DigestCache(cache, 0.0), full=True)

    def counting(descriptor, count, offset):
        read.append(count)
        return real(descriptor, count, offset)

    patch_library(monkeypatch, shards, "os", pread=counting)
    assert of(folder, cache=DigestCache(cache, 0.0), full=True, progress=done.append) == before
    assert sum(read) >= sum(tensor.nbytes for tensor in tensors().values())
    assert done == sorted(done) and 0.9 < done[-1] <= 1.0


def forged(cache, entry):
    table = json.loads((cache / "digests.json").read_text())
    table["entries"] = dict.fromkeys(table["entries"], entry)
    (cache / "digests.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"total": "0" * 64},
        {"total": "x" * 64, "count": "1", "dtypes": ""},
        {"bytes": "zz"},
        {"total": "0" * 64, "count": "-1", "dtypes": "F32"},
    ],
)
def test_a_forged_entry_of_another_form_is_read_anew(folder, tmp_path, entry):
    cache = tmp_path / "cache"
    before = of(folder, cache=DigestCache(cache, 0.0))
    forged(cache, entry)
    assert of(folder, cache=DigestCache(cache, 0.0)) == before


def test_a_file_that_is_cut_while_it_is_read(folder, monkeypatch):
    reads = []
    real = os.pread

    def cutting(descriptor, count, offset):
        reads.append(offset)
        if len(reads) == 5:
            os.truncate(folder / SINGLE, 2000)
        return real(descriptor, count, offset)

    patch_library(monkeypatch, shards, "os", pread=cutting)
    with pytest.raises(CheckpointError, match=r"it ends at byte .* are needed; download it again"):
        of(folder)


def test_a_file_that_is_written_to_while_it_is_read(folder, tmp_path, monkeypatch):
    real, reads = os.pread, []

    def writing(descriptor, count, offset):
        reads.append(offset)
        if len(reads) == 5:
            os.utime(folder / SINGLE, (1, 1))
        return real(descriptor, count, offset)

    patch_library(monkeypatch, shards, "os", pread=writing)
    with pytest.raises(CheckpointError, match="was written to while it was read"):
        of(folder, cache=DigestCache(tmp_path / "cache", 0.0))
    assert not (tmp_path / "cache").exists()


def write_header(folder, header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + data
    )


GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "length", "complaint"),
    [
        (b"", 2**63, "its header would have"),
        (b"{}", 10**9, "its header would have"),
        (b"\xff\xff", None, "not UTF-8"),
        (b"[" * 50_000, None, "nested too deeply"),
        ([], None, "its header is []"),
        ({"a": 5}, None, "tensor 'a' is 5"),
        ({"a": {**GOOD, "shape": [-1]}}, None, "tensor 'a' is"),
        ({"a": {**GOOD, "shape": [10**400]}}, None, "tensor 'a': 16 bytes are not F32"),
        ({"a": {**GOOD, "shape": [10**400] * 20_000}}, None, "tensor 'a': 16 bytes are not F32"),
        ({"a": {**GOOD, "shape": [2, 0], "data_offsets": [0, 0]}}, None, None),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [8, 24]}}, None, "'a' and 'b' lie in the same bytes"),
        ({"a": {**GOOD, "dtype": 3}}, None, "tensor 'a' is"),
        ({"a": {**GOOD, "data_offsets": [0, 65]}}, None, "of 64 bytes"),
        ({"a": {**GOOD, "data_offsets": [16, 0]}}, None, "of 64 bytes"),
        ({"a": {**GOOD, "data_offsets": [0, 2**70]}}, None, "of 64 bytes"),
        ({"a": {**GOOD, "data_offsets": [0]}}, None, "tensor 'a' is"),
        ({"a": {**GOOD, "data_offsets": [0.0, 16.0]}}, None, "tensor 'a' is"),
    ],
)
def test_headers_that_lie(folder, header, length, complaint):
    write_header(folder, header, length=length)
    if complaint is None:
        of(folder)
        return
    with pytest.raises(CheckpointError) as caught:
        of(folder)
    assert str(folder / SINGLE) in caught.value.message and complaint in caught.value.message


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_bytes_are_a_file_or_a_refusal(tmp_path, data, length):
    for text in (data, length.to_bytes(8, "little") + data, len(data).to_bytes(8, "little") + data):
        (tmp_path / SINGLE).write_bytes(text)
        try:
            of(tmp_path)
        except CheckpointError as error:
            assert SINGLE in error.message


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "missing"])
def test_what_is_no_file(folder, kind):
    (folder / SINGLE).unlink()
    if kind == "a pipe":
        os.mkfifo(folder / SINGLE)
    elif kind == "a folder":
        (folder / SINGLE).mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (is not a plain file|cannot be read)"):
        of(folder)


def sparse_checkpoint(folder, layers, experts, size):
    """Headers of a large checkpoint over files without any block on the disk."""
    folder.mkdir()
    names = [
        f"model.layers.{y}.mlp.experts.{e}.{p}_proj.weight"
        for y in range(layers)
        for e in range(experts)
        for p in ("gate", "up", "down")
    ]
    names += [f"model.layers.{y}.self_attn.{p}_proj.weight" for y in range(layers) for p in "qkvo"]
    entry = {"dtype": "BF16", "shape": [size // 2]}
    header = {n: {**entry, "data_offsets": [i * size, (i + 1) * size]} for i, n in enumerate(names)}
    write_header(folder, header, data=b"")
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size + len(names) * size)
    return (folder / SINGLE).stat().st_size


@pytest.mark.slow
def test_a_large_checkpoint_is_known_soon(tmp_path):
    """14 GB in 18,624 tensors, as a sparse file: the first look goes through all, one from the cache does not."""
    size = sparse_checkpoint(tmp_path / "large", 48, 128, 750_000)
    assert size > 13_900_000_000
    made = []
    for _ in range(2):
        with Calls() as calls:
            found = of(tmp_path / "large", cache=DigestCache(tmp_path / "cache", 0.0))
        made.append(calls.made)
    assert found["expert weights"].endswith("(18,432 tensors of BF16)")
    assert made[0] > 18_000 > 10 * made[1], made
    shutil.rmtree(tmp_path / "large")


def test_names_of_things():
    assert (
        weights_of("expert") == "expert weights"
        and weights_of("expert", full=True) == "expert weights (all bytes)"
    )
    assert tally.SAMPLES * tally.SAMPLE_BYTES == 256 and shards.MOST_HEADER == 100_000_000
