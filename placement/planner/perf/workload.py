"""What the requests look like: lengths of prompts and answers, arrivals, and the cache that a decode step sees.

Lengths are numbers, distributions ("lognormal 1000 0.8") or from a trace (`trace_reader.py`). A long answer takes part
in more decode steps than a short one, so contexts are weighted by the answer's length. Example: answers of 100 and of
300 tokens are equally frequent; three of four requests in a decode step have the long one.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afserve.errors import ConfigError, shown

Array = NDArray[np.float64]
SAMPLES = 4096
LONGEST = 1e8  # tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """One length of every request: its mean and standard deviation, tokens. `shape` is how samples are drawn:
    fixed, uniform (0..2 mean), exponential, lognormal."""

    mean: float
    deviation: float = 0.0
    shape: str = "fixed"

    def __str__(self) -> str:
        if self.deviation <= 0:
            return f"{self.mean:g}"
        return f"{self.shape} {self.mean:g}" + (
            "" if self.shape == "exponential" else f" +-{self.deviation:g}"
        )

    def sample(self, rng: "np.random.Generator | None", count: int) -> Array:
        if self.deviation <= 0 or self.shape == "fixed" or rng is None:
            return np.full(count, self.mean)
        if self.shape == "uniform":
            half = self.deviation * 3**0.5
            return np.maximum(np.rint(rng.uniform(self.mean - half, self.mean + half, count)), 1.0)
        if self.shape == "exponential":
            return np.maximum(np.rint(rng.exponential(self.mean, count)), 1.0)
        sigma = float(np.sqrt(np.log1p((self.deviation / self.mean) ** 2)))
        return np.maximum(np.rint(rng.lognormal(np.log(self.mean) - sigma**2 / 2, sigma, count)), 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests as samples: prompt and answer tokens, and arrival seconds (empty = as many as wanted, at once).

    `context_mean`, `context_deviation`: cached tokens of a request met at a random decode step.
    `decode_only`: prompts are prefilled elsewhere.
    `prompt_variation`: the squared coefficient of variation of prompt lengths, 0 when all are equal.
    """

    name: str
    prompt: Array
    answer: Array
    arrival: Array
    context_mean: float
    context_deviation: float
    decode_only: bool = False
    mean_prompt: float = field(init=False)
    mean_answer: float = field(init=False)
    prompt_variation: float = field(init=False)

    def __post_init__(self) -> None:
        """A search asks for them a hundred thousand times."""
        object.__setattr__(self, "mean_prompt", float(self.prompt.mean()))
        object.__setattr__(self, "mean_answer", float(self.answer.mean()))
        object.__setattr__(self, "prompt_variation", float(self.prompt.var()) / self.mean_prompt**2)


def fixed_context(context: float) -> Workload:
    """Every cache holds `context` tokens: the setting of most published decode numbers."""
    if not 1 <= context <= LONGEST:
        raise ConfigError(f"--context must be 1 to {LONGEST:g} tokens, not {context:g}")
    one = np.ones(1)
    return Workload(f"context {context:g}", one * context, one, np.zeros(0), context, 0.0, decode_only=True)


def from_lengths(prompt: Lengths, answer: Lengths, *, seed: int = 0, decode_only: bool = False) -> Workload:
    drawn = {prompt.shape, answer.shape} != {"fixed"}  # else numpy.random need not be imported
    rng = np.random.default_rng(seed) if drawn else None
    name = f"input {prompt}, output {answer}"
    return from_samples(
        name, prompt.sample(rng, SAMPLES), answer.sample(rng, SAMPLES), np.zeros(0), decode_only
    )


def from_samples(
    name: str, prompt: Array, answer: Array, arrival: Array, decode_only: bool = False
) -> Workload:
    """At a random decode step of request i the cache holds prompt + uniform(0, answer); i has weight answer_i."""
    weight = answer / answer.sum()
    mean = float((weight * (prompt + answer / 2)).sum())
    square = float((weight * (prompt**2 + prompt * answer + answer**2 / 3)).sum())
    return Workload(name, prompt, answer, arrival, mean, max(square - mean**2, 0.0) ** 0.5, decode_only)


def parse_lengths(text: str, option: str) -> Lengths:
    """ "1000" or "KIND MEAN DEVIATION" with kind lognormal or uniform, or "exponential MEAN"."""
    lengths = _lengths(text.replace(":", " ").replace(",", " ").split())
    if lengths is None:
        raise ConfigError(
            f"--{option}: cannot read {shown(text)}. Give tokens, or 'lognormal MEAN DEVIATION', "
            "'uniform MEAN DEVIATION', 'exponential MEAN'"
        )
    if not 1 <= lengths.mean <= LONGEST:
        raise ConfigError(f"--{option} must be 1 to {LONGEST:g} tokens, not {lengths.mean:g}")
    if not 0 <= lengths.deviation <= LONGEST:
        raise ConfigError(
            f"--{option}: a deviation must be 0 to {LONGEST:g} tokens, not {lengths.deviation:g}"
        )
    return lengths


def _lengths(words: list[str]) -> Lengths | None:
    try:
        if len(words) == 1:
            return Lengths(float(words[0]))
        kind, numbers = words[0].lower() if words else "", [float(word) for word in words[1:]]
    except ValueError:
        return None
    if kind == "exponential" and len(numbers) == 1:
        return Lengths(numbers[0], numbers[0], kind)
    if kind in ("lognormal", "uniform") and len(numbers) == 2:
        return Lengths(numbers[0], numbers[1], kind)
    return None
