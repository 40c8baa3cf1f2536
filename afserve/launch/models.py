"""From what a user calls a model to a folder with a config.json: a bundled name, a folder, or a Hugging Face id.

Nothing is downloaded: an id is looked up in the local Hugging Face cache. A name of configs/models is a shape
without weights, which `--load-format dummy` can run.
"""

import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import afserve
from afserve.errors import ConfigError
from afserve.families.table import spec_from_config
from afserve.tokenizer import listed_eos_ids

CONFIGS = Path(afserve.__file__).parent / "configs"
BUNDLED = ("nano",)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """`folder` holds config.json; `tokenizer` tokenizer.json. `weights` False: only the shape is known."""

    name: str
    folder: Path
    tokenizer: Path
    weights: bool


def find_model(model: str, scratch: Path) -> FoundModel:
    """Raises ConfigError that lists what there is. A shape's config.json is written below `scratch`."""
    if model in BUNDLED:
        return _folder(CONFIGS / model, model)
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return _folder(path.resolve(), path.resolve().name)
    if path.is_dir():
        raise ConfigError(
            f"--model {model}: the folder has no config.json; a model is a Hugging Face checkpoint folder"
        )
    shape = _shape_file(model)
    if shape is not None:
        return _from_shape(shape, scratch)
    if _HUB_ID.fullmatch(model):
        return _cached(model)
    raise ConfigError(
        f"--model {model}: neither a folder, nor a bundled model ({', '.join(BUNDLED)}), nor a known shape "
        f"({', '.join(shapes())}), nor a Hugging Face id (owner/name)"
    )


def shapes() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "models").glob("*.toml"))


def _folder(folder: Path, name: str) -> FoundModel:
    listed_eos_ids(folder)  # a wrong one is refused here rather than by a node that has read its weights
    weights = any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file()
    return FoundModel(name, folder, _tokenizer(folder), weights)


def _tokenizer(folder: Path) -> Path:
    """A model with random weights may lack one; the bundled one then makes its noise readable."""
    return folder if (folder / "tokenizer.json").is_file() else CONFIGS / "nano"


def _shape_file(model: str) -> Path | None:
    if not re.fullmatch(r"[\w.-]+", model):
        return None
    wanted = model.lower()
    direct = CONFIGS / "models" / f"{wanted}.toml"
    if direct.is_file():
        return direct
    for path in sorted((CONFIGS / "models").glob("*.toml")):
        meta = tomllib.loads(path.read_text(encoding="utf-8")).get("meta", {})
        if wanted in meta.get("aliases", ()):
            return path
    return None


def _from_shape(shape: Path, scratch: Path) -> FoundModel:
    config = tomllib.loads(shape.read_text(encoding="utf-8")).get("config", {})
    spec_from_config(config, where=f"configs/models/{shape.name}")  # refused here, under its own name
    folder = scratch / shape.stem
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"dtype": "bfloat16", **config}, indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return FoundModel(shape.stem, folder, CONFIGS / "nano", weights=False)


def _cached(model: str) -> FoundModel:
    snapshots = _hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"--model {model}: not in the local Hugging Face cache ({_hub_cache()}); afserve downloads nothing. "
            f"Fetch it with `hf download {model}` and start again, or pass a folder"
        )
    return _folder(found[-1].parent, model)


def _hub_cache() -> Path:
    """Where Hugging Face's own tools keep it; their variables, not ours."""
    home = os.environ.get("HF_HOME")
    hub = os.environ.get("HF_HUB_CACHE")
    if hub:
        return Path(hub)
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
