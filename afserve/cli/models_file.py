"""The file of `afserve up --models FILE`: a table for each model, whose keys are the names of options.

What the command line or the environment says holds for every model; a table comes before the file of --config.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from afserve.cli.config_file import SCHEMA
from afserve.cli.options import read_given_toml
from afserve.config import EngineSettings, ModelSource
from afserve.errors import ConfigError, shown
from afserve.launch.plan.ray_settings import RaySettings
from afserve.launch.plan.wishes import Wishes
from afserve.settings import flag_of, settings_of

MOST_MODELS = 16
NAME = "name"
_OF_A_RUN = ("model", "revision", "download", "transport", "verify", "rebalance")
_GROUPS = (ModelSource, Wishes, EngineSettings)
_DECLARED = {one.name for group in _GROUPS for one in settings_of(group)}
OWN = frozenset(_OF_A_RUN) | _DECLARED - {"gateways"}
# What several models cannot share, or what each of them has in its table.
_ALONE = {
    "cluster": "its hosts are one model's",
    "listen": "nodes of several models start here only",
    "elsewhere": "nodes of several models start here only",
    "ssh": "nodes of several models start here only",
    "gateways": "several models have one gateway, in this process",
    "record_routing": "POST /admin/routing/start?model=NAME records one model's",
    "served_model_name": "write name = in its table",
    "model": "write model = in its table",
    **{one.name: "nodes of several models start here only" for one in settings_of(RaySettings)},
}
_FROM_USER = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
Flags = dict[str, object]


def models_of(
    ctx: click.Context, path: Path, flags: Mapping[str, object], given: Collection[str]
) -> list[Flags]:
    """The flags of each model; `given` names those that the user gave.

    Raises ConfigError naming the file, the model and the key, or a flag that cannot be.
    """
    for name, why in _ALONE.items():
        if name in given:
            raise ConfigError(f"{flag_of(name)}: cannot be given with --models: {why}; drop it")
    options = {str(param.name): param for param in ctx.command.params}
    return [
        _Table(path, number, table).flags(ctx, options, flags) for number, table in enumerate(_read(path), 1)
    ]


def _read(path: Path) -> list[Mapping[str, object]]:
    values = read_given_toml(path, f"--models {path}")
    schema, tables = values.pop("schema", SCHEMA), values.pop("model", [])
    if schema != SCHEMA or isinstance(schema, bool):
        raise ConfigError(
            f"--models {path}: schema: {shown(schema)} is not {SCHEMA}, which this afserve reads"
        )
    if values:
        raise ConfigError(
            f"--models {path}: {next(iter(values))}: stands in no table; what is one model's belongs below its "
            "[[model]], everything else on the command line or in the file of --config"
        )
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise ConfigError(f"--models {path}: names no model; write [[model]] for each")
    if len(tables) > MOST_MODELS:
        raise ConfigError(f"--models {path}: {len(tables)} models, at most {MOST_MODELS} are served")
    return tables


class _Table:
    """One [[model]]."""

    def __init__(self, path: Path, number: int, table: Mapping[str, object]) -> None:
        self._where = f"--models {path}: model {number}"
        self._table = {key.replace("-", "_"): value for key, value in table.items()}

    def flags(
        self, ctx: click.Context, options: Mapping[str, click.Parameter], flags: Mapping[str, object]
    ) -> Flags:
        found = dict(flags)
        for key, value in self._table.items():
            if key == NAME:
                found["served_model_name"] = self._names(value)
            elif key not in OWN:
                raise self._wrong(key, self._why_not(key, key in options))
            elif isinstance(value, dict | list):
                raise self._wrong(key, f"{shown(value)} is not a single value")
            elif ctx.get_parameter_source(key) not in _FROM_USER:
                found[key] = self._converted(ctx, options[key], value)
        if "model" not in self._table:
            raise self._wrong("model", "is missing; write what --model takes, such as a checkpoint folder")
        return found

    def _names(self, value: object) -> tuple[str, ...]:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise self._wrong(NAME, f"{shown(value)} is neither a text nor a list of texts")
        if len(set(names)) < len(names):
            raise self._wrong(NAME, f"{shown(value)} has a name twice; write it once")
        return tuple(names)

    def _converted(self, ctx: click.Context, option: click.Parameter, value: object) -> object:
        """As the flag's own text would be."""
        try:
            return option.process_value(ctx, value)
        except click.UsageError as error:
            raise self._wrong(str(option.name), error.message) from error
        except ConfigError as error:
            raise self._wrong(str(option.name), error.message) from error

    def _why_not(self, key: str, known: bool) -> str:
        if known:
            return "is not one model's; give it on the command line or in the file of --config"
        return f"is not one of {', '.join(sorted({NAME, *OWN}))}"

    def _wrong(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key}: {why}", param="models")
