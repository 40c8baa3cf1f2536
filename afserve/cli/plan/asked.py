"""The question of `afserve plan` as it was typed: its flags in the order they were given, without those that say
where answers go."""

import shlex
from collections.abc import Mapping

import click
from click.core import ParameterSource

OUTPUTS = frozenset({"top", "as_json", "charts", "cluster", "reports"})


def typed_flags(context: click.Context) -> dict[str, str]:
    """How each flag that was given is spelled, by its parameter, in the order of the first time each was given (click
    takes them in that order); switches that are off are spelled as click does."""
    options = {option.name: option for option in context.command.params if isinstance(option, click.Option)}
    return {
        name: _spelled(options[name], value)
        for name, value in context.params.items()
        if name in options
        and name not in OUTPUTS
        and context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
    }


def command_line(typed: Mapping[str, str]) -> str:
    return " ".join(["afserve plan", *typed.values()])


def _spelled(option: click.Option, value: object) -> str:
    if option.is_flag:
        return option.opts[0] if value or not option.secondary_opts else option.secondary_opts[0]
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{option.opts[0]} {shlex.quote(_word(one))}" for one in values)


def _word(value: object) -> str:
    """Whole numbers without a fraction, as people write them."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)
