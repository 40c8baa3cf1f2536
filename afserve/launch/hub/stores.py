"""GGUF files that Ollama and LM Studio have fetched, by the names that these give them.

Ollama's manifests say which blob is a model's; LM Studio's folders are PUBLISHER/MODEL. Nothing is fetched or written.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from afserve.errors import CheckpointError, ConfigError, shown
from afserve.json_file import read_object

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_OLLAMA_NAME = re.compile(rf"((?:{_WORD}/){{0,2}})({_WORD})(?::({_WORD}))?")
_LM_STUDIO_NAME = re.compile(rf"(?:{_WORD}/){{0,2}}{_WORD}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
_MOST_LISTED = 10


def is_stored_name(model: str) -> bool:
    return model.startswith((OLLAMA, LM_STUDIO))


def stored_file(model: str) -> Path:
    """Of `ollama:NAME:TAG`, `ollama:hf.co/OWNER/NAME:TAG`, `lmstudio:PUBLISHER/NAME` or `lmstudio:PUBLISHER/NAME/FILE`.
    Raises ConfigError that says where it looked and what is there."""
    if model.startswith(OLLAMA):
        return _of_ollama(model, model.removeprefix(OLLAMA))
    return _of_lm_studio(model, model.removeprefix(LM_STUDIO))


def _of_ollama(model: str, name: str) -> Path:
    match = _OLLAMA_NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"--model {shown(model)}: a name of Ollama's is NAME, NAME:TAG or OWNER/NAME:TAG")
    stem, last, tag = match[1], match[2], match[3] or "latest"
    inside = {
        0: f"registry.ollama.ai/library/{last}",
        1: f"registry.ollama.ai/{stem}{last}",
        2: f"{stem}{last}",
    }
    folders = _ollama_folders()
    for folder in folders:
        manifest = folder / "manifests" / inside[stem.count("/")] / tag
        if manifest.is_file():
            return _blob(folder, manifest)
    there = sorted({known for folder in folders for known in _ollama_names(folder)})
    raise ConfigError(f"--model {model}: not in {_listed(folders)}; {_known(there)}")


def _blob(folder: Path, manifest: Path) -> Path:
    layers = read_object(manifest).get("layers")
    for layer in layers if isinstance(layers, list) else []:
        digest = layer.get("digest") if isinstance(layer, dict) and layer.get("mediaType") == _MODEL else None
        match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if match:
            blob = folder / "blobs" / f"sha256-{match[1]}"
            if not blob.is_file():
                raise CheckpointError(f"{manifest}: its blob {blob} is not there; pull the model again")
            return blob
    raise CheckpointError(f"{manifest}: names no blob of a model; pull the model again")


def _ollama_folders() -> list[Path]:
    """Where OLLAMA_MODELS says, or where a user's and a service's Ollama keep them."""
    given = os.environ.get("OLLAMA_MODELS", "")
    return [Path(given)] if given else [*_homes(".ollama/models"), Path("/usr/share/ollama/.ollama/models")]


def _ollama_names(folder: Path) -> Iterator[str]:
    root = folder / "manifests"
    for path in root.glob("*/*/*/*"):
        registry, owner, name, tag = path.relative_to(root).parts
        host = "" if registry == "registry.ollama.ai" else f"{registry}/"
        yield f"{OLLAMA}{host}{'' if owner == 'library' else f'{owner}/'}{name}:{tag}"


def _of_lm_studio(model: str, name: str) -> Path:
    if _LM_STUDIO_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"--model {shown(model)}: a name of LM Studio's is PUBLISHER/NAME or PUBLISHER/NAME/FILE"
        )
    folders = [*_homes(".lmstudio/models"), *_homes(".cache/lm-studio/models")]
    files = {f"{LM_STUDIO}{path.relative_to(folder)}": path for folder in folders for path in _firsts(folder)}
    wanted = f"{LM_STUDIO}{name}"
    found = [path for known, path in files.items() if known == wanted or known.rpartition("/")[0] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(path.name for path in found)
        raise ConfigError(f"--model {model}: {len(found)} files: {several}; add /FILE to the name")
    raise ConfigError(f"--model {model}: not in {_listed(folders)}; {_known(sorted(files))}")


def _firsts(folder: Path) -> Iterator[Path]:
    """Of a model in parts the first one; encoders of images are none."""
    for path in sorted(folder.glob("*/*/*.gguf")):
        part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", path.name)
        if not path.name.startswith("mmproj") and (part is None or int(part[1]) == 1):
            yield path


def _homes(inside: str) -> list[Path]:
    try:
        return [Path.home() / inside]
    except RuntimeError:  # a user without a home
        return []


def _listed(folders: list[Path]) -> str:
    return " or ".join(map(str, folders)) or "any home folder"


def _known(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"there: {', '.join(names[:_MOST_LISTED])}{more}" if names else "nothing is there"
