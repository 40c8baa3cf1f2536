"""Where `afserve plan` finds models, hardware and fitted curves: names in configs/, or paths to the user's own files.

The only part of the planner that opens configuration files. A wrong name is answered with the nearest known ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import afserve
from afserve.cli.options import read_given_bytes, read_given_text, read_given_toml
from afserve.errors import ConfigError, NotFoundError, shown
from afserve.json_file import LIST_BYTES, read_object
from afserve.placement.planner.perf.acceptance import MeasuredLengths, measured_lengths
from afserve.placement.planner.perf.attention import PUBLISHED, Precision
from afserve.placement.planner.perf.curve import CurveSet, curves_from_table
from afserve.placement.planner.perf.engine import Engine
from afserve.placement.planner.perf.engine_file import engine_from_values
from afserve.placement.planner.perf.fields import nearest
from afserve.placement.planner.perf.hardware import Hardware, hardware_from_table
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.shape_reader import shape_from_config

CONFIGS = Path(afserve.__file__).parent / "configs"


def load_model(name: str) -> ModelShape:
    """A name in configs/models (or an alias), `nano`, a TOML file, a GGUF file, a config.json or a folder that holds
    one. The same layers as a known model's are that model, whatever the name."""
    found = _shape(name)
    if found.name in _measured_models():
        other = not found.same_layers(_shape(found.name))
        return replace(found, rows_of=f"{found.name} of {name}" if other else "")
    known = next((one for one in _measured_models() if found.same_layers(_shape(one))), "")
    return replace(found, rows_of=known)


@lru_cache(maxsize=1)
def _measured_models() -> tuple[str, ...]:
    """Those of which an engine has rows."""
    rows = (row for name in engine_names() for row in load_engine(name).rows.like)
    return tuple(sorted({like.model for like in rows}))


def _shape(name: str) -> ModelShape:
    path = Path(name)
    for folder in (path, CONFIGS / name):
        if folder.is_dir() and (folder / "config.json").is_file():
            return _from_json(folder.name, folder / "config.json")
    if path.suffix == ".json" and path.is_file():
        return _from_json(path.parent.name or path.stem, path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    found = _find("models", name)
    if found is None:
        raise NotFoundError(
            f"--model {name}: no such model; {nearest(name, _names('models'))} A path to a Hugging Face config.json "
            "or to a GGUF file works too",
            param="model",
        )
    table = read_given_toml(found)
    config = table.get("config")
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{found}: [config] is missing; copy the fields of config.json there", param="model"
        )
    meta = _meta(table)
    shape = shape_from_config(str(meta.get("name", found.stem)), config, source=str(found))
    if (stored := meta.get("weights", "")) not in PUBLISHED:
        raise ConfigError(f"{found}: meta.weights: {stored!r} is not one of fp8 and mxfp4", param="model")
    return replace(shape, stored=str(stored))


def _from_gguf(path: Path) -> ModelShape:
    """What reads GGUF files also reads tokenizers, which no other model needs here."""
    from afserve.models.gguf.folder import model_name, read_model

    return shape_from_config(model_name(path), read_model(path).config, source=str(path))


def _from_json(name: str, path: Path) -> ModelShape:
    return shape_from_config(name, read_object(path, refusal=ConfigError), source=str(path))


def load_hardware(name: str) -> Hardware:
    """A name in configs/hardware (or an alias), or a TOML file of the user's."""
    found = _find("hardware", name)
    if found is None:
        raise NotFoundError(
            f"--pool {name}: no such hardware; {nearest(name, _names('hardware'))} Copy one of configs/hardware/*.toml "
            "to describe your own and give its path",
            param="pool",
        )
    chip = hardware_from_table(str(found), read_given_toml(found))
    if found.parent == CONFIGS / "hardware":
        return chip
    known = (load_hardware(one) for one in _names("hardware"))
    same = next((one.name for one in known if chip.same_figures(one)), "")
    return replace(chip, rows_of=same or f"{chip.name} of {found}")


def load_curves(
    name: str,
    shape: ModelShape | None = None,
    chip: Hardware | None = None,
    precision: Precision | None = None,
    option: str = "curves",
) -> CurveSet:
    """Fitted efficiency curves: a name in configs/hardware/fits, a path, both with those of experts on CPUs beside
    them, or the JSON lines that `afserve bench` measured on this machine, which are fitted here for that shape, chip
    and precision. `option` is named in errors."""
    path = Path(name)
    if path.suffix == ".jsonl" and shape and chip and precision:
        from afserve.placement.planner.perf.calibration import fit_calibration, models_of, read_calibration

        lines = read_lines(path, option)
        fitted = fit_calibration(name, read_calibration(name, lines), shape, chip, precision)
        fitted.models = models_of(lines)
        return fitted
    if not path.is_file():
        path = CONFIGS / "hardware" / "fits" / f"{name}.toml"
    if not path.is_file():
        known = [found.stem for found in (CONFIGS / "hardware" / "fits").glob("*.toml")]
        raise NotFoundError(f"--curves {name}: no such fits file; {nearest(name, known)}", param="curves")
    found, kernels = curves_from_table(str(path), read_given_toml(path)), CONFIGS / "cpu_kernels.toml"
    found.curves = {**curves_from_table(str(kernels), read_given_toml(kernels)).curves, **found.curves}
    return found


def load_lengths() -> tuple[MeasuredLengths, ...]:
    """Published mean accepted lengths of drafts."""
    path = CONFIGS / "drafts.toml"
    return measured_lengths(str(path), read_given_toml(path))


def load_engine(name: str) -> Engine:
    """A profile in configs/engines, or a JSON file of the user's."""
    path = Path(name)
    if path.suffix != ".json":
        path = CONFIGS / "engines" / f"{name.lower()}.json"
    if not path.is_file():
        raise NotFoundError(
            f"--engine {shown(name)}: no such engine; {nearest(name, engine_names())} A profile that `python -m "
            "bench.planner_engines` wrote works too, and the .jsonl of `afserve bench calibrate`",
            param="engine",
        )
    return _own_engine(path) if path.is_relative_to(CONFIGS) else _read_engine(path)


@lru_cache
def _own_engine(path: Path) -> Engine:
    """What is installed does not change, and what is known of its rows is kept with them."""
    return _read_engine(path)


def _read_engine(path: Path) -> Engine:
    return engine_from_values(str(path), read_object(path, refusal=ConfigError))


def engine_names() -> list[str]:
    return [path.stem for path in (CONFIGS / "engines").glob("*.json")]


def read_lines(path: Path, option: str) -> list[str]:
    return read_given_text(path, f"--{option} {path}").splitlines()


def read_counts(path: Path) -> tuple[tuple[float, ...], int]:
    """Any file that `afserve place` takes: the mean share of the hottest expert, of the second, and so on, over the
    layers of all scenarios in it; and of how many layers of one scenario."""
    from afserve.placement.rebalance.record import MAGIC, decode
    from afserve.placement.rebalance.record import read_counts as scenarios_of

    data = read_given_bytes(path, f"--counts {path}", LIST_BYTES)
    try:
        text = "" if data.startswith(MAGIC) else data.decode()
        scenarios = scenarios_of(text) if text else {"": decode(data).total_load()}
    except UnicodeDecodeError as error:
        raise ConfigError(f"--counts {path}: neither JSON nor a routing recording") from error
    except ConfigError as error:
        raise ConfigError(f"--counts {path}: {error.message}") from error
    rows = [sorted(map(float, layer), reverse=True) for layers in scenarios.values() for layer in layers]
    rows = [row for row in rows if sum(row) > 0]
    if not rows:
        raise ConfigError(f"--counts {path}: no expert was ever chosen")
    layers = max(len(layers) for layers in scenarios.values())
    shares = tuple(sum(row[place] / sum(row) for row in rows) / len(rows) for place in range(len(rows[0])))
    return shares, layers


def _find(folder: str, name: str) -> Path | None:
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    direct = CONFIGS / folder / f"{name.lower()}.toml"
    if direct.is_file():
        return direct
    wanted = name.lower().rsplit("/", 1)[-1]
    for candidate in sorted((CONFIGS / folder).glob("*.toml")):
        aliases = _meta(read_given_toml(candidate)).get("aliases", [])
        if candidate.stem == wanted or (isinstance(aliases, list) and wanted in aliases):
            return candidate
    return None


def _names(folder: str) -> list[str]:
    return [path.stem for path in (CONFIGS / folder).glob("*.toml")]


def _meta(table: Mapping[str, object]) -> Mapping[str, object]:
    meta = table.get("meta")
    return meta if isinstance(meta, Mapping) else {}
