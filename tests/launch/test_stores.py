"""Models that Ollama and LM Studio have, found by name, and what is said of those that are not there."""

import json

import pytest

from afserve.errors import CheckpointError, ConfigError
from afserve.launch.hub.stores import is_stored_name, stored_file
from afserve.launch.plan.models import find_model

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def pulled(models, manifest, digest=f"sha256:{DIGEST}"):
    path = models / "manifests" / manifest
    path.parent.mkdir(parents=True)
    kinds = {
        "application/vnd.ollama.image.license": "sha256:" + "00" * 32,
        "application/vnd.ollama.image.model": digest,
    }
    path.write_text(json.dumps({"layers": [{"mediaType": kind, "digest": of} for kind, of in kinds.items()]}))
    blob = models / "blobs" / f"sha256-{DIGEST}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(b"GGUF")
    return blob


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("qwen3:30b", "registry.ollama.ai/library/qwen3/30b"),
        ("qwen3", "registry.ollama.ai/library/qwen3/latest"),
        ("somebody/mine:q8", "registry.ollama.ai/somebody/mine/q8"),
        ("hf.co/owner/Name-GGUF:Q4_K_M", "hf.co/owner/Name-GGUF/Q4_K_M"),
    ],
)
def test_a_blob_by_ollama_s_name(home, monkeypatch, name, manifest):
    blob = pulled(home / ".ollama" / "models", manifest)
    assert is_stored_name(f"ollama:{name}") and stored_file(f"ollama:{name}") == blob
    moved = home / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(moved))
    blob = pulled(moved, manifest)
    assert stored_file(f"ollama:{name}") == blob


def test_what_ollama_lacks(home):
    with pytest.raises(ConfigError, match=r"--model ollama:x: not in .*\.ollama/models.*nothing is there"):
        stored_file("ollama:x")
    models = home / ".ollama" / "models"
    pulled(models, "registry.ollama.ai/library/qwen3/30b")
    with pytest.raises(ConfigError, match="there: ollama:qwen3:30b"):
        stored_file("ollama:qwen3:8b")
    (models / "blobs" / f"sha256-{DIGEST}").unlink()
    with pytest.raises(CheckpointError, match="is not there; pull the model again"):
        stored_file("ollama:qwen3:30b")


@pytest.mark.parametrize("digest", [None, 7, "sha256:../../x", "md5:00"])
def test_a_manifest_that_lies(home, digest):
    pulled(home / ".ollama" / "models", "registry.ollama.ai/library/m/latest", digest)
    with pytest.raises(CheckpointError, match="names no blob of a model"):
        stored_file("ollama:m")


@pytest.mark.parametrize("name", ["", "..", "a/../b", "a/b/c/d", "/etc/passwd", "x:", "a b"])
def test_names_that_are_none(home, name):
    for prefix in ("ollama:", "lmstudio:"):
        with pytest.raises(ConfigError, match=r"a name of |not in "):
            stored_file(prefix + name)


def test_a_file_of_lm_studio(home):
    folder = home / ".lmstudio" / "models" / "maker" / "Model-GGUF"
    folder.mkdir(parents=True)
    one = folder / "model-00001-of-00002.gguf"
    for name in (one.name, "model-00002-of-00002.gguf", "mmproj-model.gguf"):
        (folder / name).write_bytes(b"GGUF")
    assert stored_file("lmstudio:maker/Model-GGUF") == one
    (folder / "model-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"2 files: .*; add /FILE to the name"):
        stored_file("lmstudio:maker/Model-GGUF")
    assert stored_file("lmstudio:maker/Model-GGUF/model-Q8_0.gguf") == folder / "model-Q8_0.gguf"
    with pytest.raises(ConfigError, match="there: lmstudio:maker/Model-GGUF/model-00001"):
        stored_file("lmstudio:maker/Other")


def test_a_name_leads_to_the_file(home, tmp_path):
    pulled(home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/30b")
    with pytest.raises(CheckpointError, match=f"sha256-{DIGEST}: not a whole GGUF file"):
        find_model("ollama:qwen3:30b", tmp_path)
