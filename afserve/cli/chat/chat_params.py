"""`/params` of a conversation: how tokens are chosen, shown and changed by name."""

from dataclasses import replace

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import RequestError, shown

_KINDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
_OPEN = ("seed", "max_tokens")  # those that may be none


def told(params: SamplingParams, unlimited: bool) -> str:
    """All of them in a line."""
    values = {name: getattr(params, name) for name in _KINDS}
    if unlimited:
        values["max_tokens"] = None
    return " ".join(f"{name}={'none' if value is None else value}" for name, value in values.items())


def changed(params: SamplingParams, unlimited: bool, text: str) -> tuple[SamplingParams, bool]:
    """After `temperature=0.2 seed=none`. Raises RequestError that names what is wrong."""
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in _KINDS:
            raise RequestError(f"/params: {shown(name)} is not one of {', '.join(_KINDS)}")
        if value == "none" and name in _OPEN:
            unlimited = unlimited or name == "max_tokens"
            params = replace(params, seed=None) if name == "seed" else params
            continue
        try:
            params = replace(params, **{name: _KINDS[name](value)})
        except ValueError as error:
            raise RequestError(f"/params: {part}: give a number, as in {name}=1") from error
        unlimited = unlimited and name != "max_tokens"
    return params, unlimited
