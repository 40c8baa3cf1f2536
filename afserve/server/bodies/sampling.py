"""The sampling fields that completions and chat share, as the engine's SamplingParams. Knows no endpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError, RequestError, shown
from afserve.server.bodies.declared import SamplingFields
from afserve.server.bodies.fields import Fields
from afserve.tokens.tokenizer import read_json

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_defaults(folder: str | Path) -> SamplingParams:
    """What the model's authors recommend in generation_config.json; the API's own defaults where they say nothing."""
    recommended = read_json(folder, "generation_config.json")
    given: dict[str, Any] = {
        name: recommended[name] for name in RECOMMENDED if recommended.get(name) is not None
    }
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{folder}/generation_config.json: {name}: {shown(value)} is not a number", param=name
            )
    try:
        return replace(SamplingParams(), **given)
    except RequestError as error:
        raise ConfigError(f"{folder}/generation_config.json: {error.message}", param=error.param) from error


def sampling_params(
    fields: Fields,
    plain: SamplingParams,
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool = False,
    grammar: str = "",
) -> SamplingParams:
    """The sampling fields of either endpoint; what is not given is `plain`'s. Ranges are SamplingParams' own."""
    return replace(
        plain,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        grammar=grammar,
        **SamplingFields.given(fields),
    )
