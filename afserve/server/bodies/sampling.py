"""The sampling fields that completions and chat share, as the engine's SamplingParams. Knows no endpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError, RequestError, shown
from afserve.server.bodies.fields import Fields, or_else
from afserve.tokens.tokenizer import read_json

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LISTED_IDS = 1024
MAX_ID_DIGITS = 20
MAX_TOKENS = 1 << 24


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
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=or_else(fields.number("temperature", 0, 2), plain.temperature),
        top_p=or_else(fields.number("top_p", 0, 1), plain.top_p),
        top_k=or_else(fields.integer("top_k", -1, 1 << 24), plain.top_k),
        min_p=or_else(fields.number("min_p", 0, 1), plain.min_p),
        repetition_penalty=or_else(fields.number("repetition_penalty", 0, 100), plain.repetition_penalty),
        presence_penalty=or_else(fields.number("presence_penalty", -2, 2), plain.presence_penalty),
        frequency_penalty=or_else(fields.number("frequency_penalty", -2, 2), plain.frequency_penalty),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        stop=_stops(fields),
        stop_token_ids=_stop_token_ids(fields),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output"),
        min_tokens=or_else(fields.integer("min_tokens", 0, MAX_TOKENS), 0),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        n=or_else(fields.integer("n", 1, 128), 1),
        logit_bias=_logit_bias(fields),
        grammar=grammar,
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.texts("stop", MAX_STOPS)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop: has {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed", param="stop"
        )
    return stops


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    fields.entries("stop_token_ids", MAX_LISTED_IDS)
    return fields.integers("stop_token_ids")


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    bias = fields.section("logit_bias")
    if bias is None:
        return ()
    fields.entries("logit_bias", MAX_LISTED_IDS)
    pairs = []
    for key in bias.raw():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise RequestError(f"logit_bias: {shown(key)} is not a token id", param="logit_bias")
        pairs.append((int(key), or_else(bias.number(key, -100, 100), 0.0)))
    return tuple(pairs)
