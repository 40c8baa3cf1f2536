"""A GGUF file as the folder that everything else reads: config.json, tokenizer and chat template out of its metadata,
links to the file and its other parts, and an index that says which of them has which tensor.

All of it is checked before anything is written. Of the weights nothing is read or copied.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from afserve.errors import CheckpointError, shown
from afserve.families.table import naming_of, spec_from_config
from afserve.gguf.architectures import Config, architecture_named, config_of
from afserve.gguf.header import TensorRow
from afserve.gguf.keeping import dequantised_rows, kept_bits
from afserve.gguf.metadata import Metadata
from afserve.gguf.names import pieces_of
from afserve.gguf.vocabulary import Vocabulary, vocabulary_of
from afserve.models.shards import GGUF_INDEX, ShardFile
from afserve.spec import ModelSpec

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1 << 12
_DTYPES = {"F32": "float32", "F16": "float16"}
_TEMPLATE = "tokenizer.chat_template"
log = logging.getLogger("afserve.models")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What is known of a model before its weights are read. `rows`: of every tensor; `files` has each one's file."""

    metadata: Metadata
    rows: Mapping[str, TensorRow]
    files: Mapping[str, Path]
    config: Config
    vocabulary: Vocabulary


def model_name(path: Path) -> str:
    """Of a file, or of one part of several."""
    match = _PART.fullmatch(path.name)
    return match[1] if match else path.name.removesuffix(".gguf")


def unfold(path: Path, folder: Path) -> Path:
    """Writes `folder`, which is returned. Raises CheckpointError for what cannot be served."""
    model = read_model(path)
    folder.mkdir(parents=True, exist_ok=True)
    for file in dict.fromkeys(model.files.values()):
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    index = {
        "architecture": model.metadata.architecture,
        "weight_map": {name: file.name for name, file in model.files.items()},
    }
    _write(folder / GGUF_INDEX, index)
    _write(folder / "config.json", model.config)
    _write(folder / "generation_config.json", {"eos_token_id": list(model.vocabulary.ends) or None})
    _write(folder / "tokenizer_config.json", {**model.vocabulary.special, **templates_of(model.metadata)})
    model.vocabulary.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if said := _dequantised(model):
        log.warning("%s: %s", path.name, said)
    return folder


def read_model(path: Path) -> GgufModel:
    """Of a file, or of all parts that its name says there are. Raises CheckpointError."""
    rows: dict[str, TensorRow] = {}
    files: dict[str, Path] = {}
    metadata = None
    parts = _parts(path)
    for part in parts:
        with ShardFile(part) as file:
            header = file.gguf_header()
        if metadata is None:
            metadata = Metadata(header.metadata, str(part))
            if metadata.integer("split.count", 1) not in (len(parts), 0):
                metadata.refuse("split.count", f"is not the {len(parts)} that the file's name says")
        for row in header.tensors:
            if row.name in rows:
                raise CheckpointError(f"{part}: tensor {shown(row.name)} is in {files[row.name].name} too")
            rows[row.name], files[row.name] = row, part
    assert metadata is not None
    config = config_of(metadata, rows)
    config["dtype"] = _dtype(rows.values())
    config["quantization_config"] = kept_bits(rows, config["dtype"])
    spec = spec_from_config(config, where=metadata.where)
    known = architecture_named(metadata.architecture, metadata.where)
    pieces_of(rows, naming_of(spec), known, spec.experts, metadata.where)
    _check_sizes(spec, rows, metadata.where)
    return GgufModel(metadata, rows, files, config, vocabulary_of(metadata, spec.vocab_size))


def _check_sizes(spec: ModelSpec, rows: Mapping[str, TensorRow], where: str) -> None:
    """What sizes memory has to be what the tensors are; of others nodes look at the shape before they read them."""
    hidden, inner, experts = spec.hidden, spec.moe.inner, spec.experts
    wanted: dict[str, tuple[int, ...]] = {"token_embd.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.layers):
        wanted[f"blk.{layer}.attn_norm.weight"] = (hidden,)
    for layer in spec.moe_layer_ids:
        stem = f"blk.{layer}.ffn_"
        wanted |= {f"{stem}{part}_exps.weight": (experts, inner, hidden) for part in ("gate", "up")}
        wanted[f"{stem}down_exps.weight"] = (experts, hidden, inner)
    for name, shape in wanted.items():
        row = rows.get(name)
        if row is None:
            raise CheckpointError(f"{where}: tensor {name} is missing, by the metadata it has shape {shape}")
        if row.shape != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {row.shape}, by the metadata {shape}")


def _parts(path: Path) -> list[Path]:
    """Where they really are, the first one first."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path.resolve()]
    count = int(match[3])
    if not 0 < int(match[2]) <= count <= _MOST_PARTS:
        raise CheckpointError(f"{path}: its name says part {int(match[2])} of {count}")
    parts = [path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.gguf") for part in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(
                f"{part}: no such file; {path.name} is one of {count} parts, download them all"
            )
    return [part.resolve() for part in parts]


def _dtype(rows: Iterable[TensorRow]) -> str:
    """What most of its bytes are in, if that is a float; blocks are de-quantised to bfloat16."""
    counted: Counter[str] = Counter()
    for row in rows:
        counted[row.kind.name] += row.end - row.begin
    return _DTYPES.get(max(counted, key=lambda kind: counted[kind]), "bfloat16")


def _dequantised(model: GgufModel) -> str:
    """Which blocks do not stay as they are; nothing where there are none."""
    found: dict[str, list[TensorRow]] = {}
    for row in dequantised_rows(model.rows):
        found.setdefault(row.kind.name, []).append(row)
    if not found:
        return ""
    which = []
    for kind, rows in found.items():
        size = sum(row.end - row.begin for row in rows) / (1 << 30)
        named = rows[0].name if len(rows) == 1 else f"{len(rows)} tensors such as {rows[0].name}"
        which.append(f"{kind} ({size:.3g} GiB: {named})")
    return (
        f"{', '.join(which)} is de-quantised to {model.config['dtype']} while it is loaded; all else stays as it is "
        "stored where the native library computes"
    )


def templates_of(metadata: Metadata) -> Config:
    """As tokenizer_config.json has them: one text, or several by name."""
    named = {key: key.removeprefix(f"{_TEMPLATE}.") for key in metadata.keys_below(f"{_TEMPLATE}.")}
    if not metadata.has(_TEMPLATE):
        return {}
    plain = metadata.string(_TEMPLATE)
    if not named:
        return {"chat_template": plain}
    several = {"default": plain, **{name: metadata.string(key) for key, name in named.items()}}
    return {"chat_template": [{"name": name, "template": text} for name, text in several.items()]}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
