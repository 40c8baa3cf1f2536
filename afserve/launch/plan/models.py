"""From what a user calls a model to a folder with a config.json: a bundled name, a folder, a GGUF file, or a Hugging
Face id.

An id is looked up in the local Hugging Face cache; `download` fetches it first, and without it nothing is downloaded.
A name of configs/models is a shape without weights, which `--load-format dummy` can run.
"""

import json
import logging
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import afserve
from afserve.errors import ConfigError, shown
from afserve.families.table import spec_from_config
from afserve.json_file import LIST_BYTES, read_text
from afserve.launch.hub.cache import CachedModel, hub_cache, is_hub_id
from afserve.launch.hub.stores import is_stored_name, stored_file
from afserve.models.gguf.folder import model_name, unfold
from afserve.models.gguf.pieces_folder import PIECES, unfold_pieces
from afserve.models.shards import GGUF_INDEX, INDEX
from afserve.quantization import Quantization
from afserve.spec import FP8_BLOCK, ModelSpec
from afserve.tokens.tokenizer import listed_eos_ids

CONFIGS = Path(afserve.__file__).parent / "configs"
BUNDLED = ("nano",)
_OTHER_TOKENIZERS = ("tiktoken.model", "vocab.json")
_HUB = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/")
_LONGEST_SAID = 300  # characters
log = logging.getLogger("afserve.launch")
Download = Callable[[str, str], Path]  # a Hugging Face id and a revision -> its folder


@dataclass(frozen=True, slots=True)
class FoundModel:
    """`folder` holds config.json; `tokenizer` tokenizer.json. `weights` False: only the shape is known; `hub` is the
    Hugging Face id where it was read, if it was, and `stored` how weights are there: `fp8`, `mxfp4`, or "" for 16
    bits."""

    name: str
    folder: Path
    tokenizer: Path
    weights: bool
    hub: str = ""
    stored: str = ""

    def published(self, spec: ModelSpec) -> ModelSpec:
        """The shape with weights as they are there."""
        if self.stored == "fp8":
            return replace(spec, fp8_block=(FP8_BLOCK, FP8_BLOCK))
        return replace(spec, quantization=Quantization("mxfp4", 4, 32)) if self.stored == "mxfp4" else spec

    def warn_of_tokenizer(self) -> None:
        """Says that texts go through a tokenizer that the model was not trained with, where they do. Raises
        CheckpointError where there is something by the name of its own that cannot be read."""
        if not self.weights or self.tokenizer != CONFIGS / "nano" or self.tokenizer == self.folder:
            return
        if os.path.lexists(own := self.folder / "tokenizer.json"):
            read_text(own, LIST_BYTES)
        others = [name for name in _OTHER_TOKENIZERS if (self.folder / name).is_file()]
        log.warning(
            "%s has no tokenizer.json%s: texts are read and written with that of %s, which is noise unless weights are "
            "random; put the model's tokenizer.json there, or ask with token ids",
            self.folder,
            f" ({others[0]} is not read)" if others else "",
            self.tokenizer.name,
        )


def find_model(
    model: str, scratch: Path, revision: str | None = None, download: Download | None = None
) -> FoundModel:
    """Raises ConfigError that lists what there is. What a shape or a GGUF file says is written below `scratch`.

    `revision` and `download` are for Hugging Face ids.
    """
    stored = stored_file(model) if is_stored_name(model) else None
    if stored is None and is_hub_id(model) and not os.path.isdir(os.path.expanduser(model)):
        found = download(model, revision or "main") if download else _cached(model, revision)
        return _folder(found, model, scratch)
    for name, given in (("revision", revision), ("download", download)):
        if given is not None:
            raise ConfigError(f"--{name}: {model} is no Hugging Face id (owner/name); drop it")
    if stored is not None:
        return _of_file(stored, model.partition(":")[2], scratch)
    if model in BUNDLED:
        return _folder(CONFIGS / model, model, scratch)
    path = Path(os.path.expanduser(model))
    if model.endswith(".gguf"):
        if not os.path.isfile(path):
            raise ConfigError(f"--model {_said(model)}: no such file")
        return _of_file(path, model_name(path), scratch)
    if os.path.isfile(path / "config.json"):  # false for a name that no file can have
        return _folder(path.resolve(), path.resolve().name, scratch)
    if os.path.isdir(path):
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it has {len(files)} GGUF file(s): give one, such as {files[0]}" if files else ""
        raise ConfigError(
            f"--model {_said(model)}: the folder has no config.json; a model is a Hugging Face checkpoint folder{hint}"
        )
    shape = catalogued("models", model)
    if shape is not None:
        return _from_shape(shape, scratch)
    known = shapes()
    alike = ", ".join(get_close_matches(model.lower()[:_LONGEST_SAID], known, 3, 0.0))
    raise ConfigError(
        f"--model {_said(model)}: neither a folder or GGUF file, nor a bundled model ({', '.join(BUNDLED)}), nor one "
        f"of {len(known)} known shapes (the nearest are {alike}), nor a Hugging Face id (owner/name)"
    )


def _said(model: str) -> str:
    """As it was typed, if that is a short line."""
    return model if model.isprintable() and 0 < len(model) <= _LONGEST_SAID else shown(model)


def shapes() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "models").glob("*.toml"))


def _folder(folder: Path, name: str, scratch: Path) -> FoundModel:
    listed_eos_ids(folder)  # a wrong one is refused here rather than by a node that has read its weights
    indexed = any((folder / name).is_file() for name in (INDEX, GGUF_INDEX))
    weights = indexed or any(folder.glob("*.safetensors"))
    return FoundModel(name, folder, _tokenizer(folder, scratch), weights)


def _of_file(path: Path, name: str, scratch: Path) -> FoundModel:
    """A GGUF file, or all of its parts."""
    return _folder(unfold(path, scratch / model_name(path)), name, scratch)


def _tokenizer(folder: Path, scratch: Path) -> Path:
    """A folder with tokenizer.json, which is made of SentencePiece's file where there is none. A model with random
    weights may lack both; the bundled one then makes its noise readable."""
    own = folder / "tokenizer.json"
    if own.is_file() and os.access(own, os.R_OK):
        return folder
    if not os.path.lexists(own) and (folder / PIECES).is_file():
        return unfold_pieces(folder, scratch / f"{folder.name}-tokenizer")
    return CONFIGS / "nano"


def catalogued(kind: str, name: str) -> Path | None:
    """The file of that name, or with that other name, in a folder of configs/ such as models or hardware."""
    if not re.fullmatch(r"[\w.-]+", name):
        return None
    wanted = name.lower()
    direct = CONFIGS / kind / f"{wanted}.toml"
    if os.path.isfile(direct):
        return direct
    for path in sorted((CONFIGS / kind).glob("*.toml")):
        meta = tomllib.loads(path.read_text(encoding="utf-8")).get("meta", {})
        if wanted in meta.get("aliases", ()):
            return path
    return None


def _from_shape(shape: Path, scratch: Path) -> FoundModel:
    table = tomllib.loads(shape.read_text(encoding="utf-8"))
    config, meta = table.get("config", {}), table.get("meta", {})
    spec_from_config(config, where=f"configs/models/{shape.name}")  # refused here, under its own name
    folder = scratch / shape.stem
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"dtype": "bfloat16", **config}, indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    found = _HUB.match(str(meta.get("source", "")))
    hub, stored = found[1] if found else "", str(meta.get("weights", ""))
    return FoundModel(shape.stem, folder, CONFIGS / "nano", weights=False, hub=hub, stored=stored)


def _cached(model: str, revision: str | None) -> Path:
    folder = CachedModel(model).snapshot(revision)
    if folder is None:
        at, flag = (f" at {revision}", f" --revision {revision}") if revision else ("", "")
        raise ConfigError(
            f"--model {model}: not in the local Hugging Face cache ({hub_cache()}){at}, and afserve downloads nothing "
            f"unasked. Fetch it with `afserve pull {model}{flag}`, or add --download, or pass a folder"
        )
    return folder
