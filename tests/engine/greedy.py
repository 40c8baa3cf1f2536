"""A model's greedy continuations, by far fewer passes than tokens: tokens that are guessed are looked at together."""

from collections.abc import Sequence
from typing import Any

import torch


def continued(model: Any, prompt: Sequence[int], new: int, guessed: Sequence[int]) -> list[int]:
    """The `new` tokens that `model`, of transformers, takes itself: what was guessed is kept as far as its own choice
    at each place is the same, and its choice comes in place of the first that is not. Where all of 64 guesses are
    right there is one pass, where none is there are 64: the answer is the same."""
    said: list[int] = []
    guess = list(guessed)[:new]
    with torch.no_grad():
        while len(said) < new:
            ids = [*prompt, *said, *guess]
            start = len(prompt) + len(said) - 1
            chosen = model(torch.tensor([ids]), use_cache=False).logits[0, start:].argmax(-1).tolist()
            same = next((n for n, token in enumerate(guess) if token != chosen[n]), len(guess))
            said += chosen[: same + 1]
            guess = guess[same + 1 :]
    return said[:new]
