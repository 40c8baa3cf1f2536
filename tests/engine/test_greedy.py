"""The oracle's continuations do not depend on what was guessed."""

import pytest
import torch

from tests.engine.driving import prompts
from tests.engine.greedy import continued

NEW = 12


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [(), (0,), (5,), (3, 4, 11), tuple(range(NEW))])
def test_a_wrong_guess_changes_nothing(oracle, spoiled):
    model, prompt = oracle("v3"), prompts()[1]
    with torch.no_grad():
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    wanted = wanted[0, len(prompt) :].tolist()
    guess = [token + 1 if n in spoiled else token for n, token in enumerate(wanted)]
    assert continued(model, prompt, NEW, guess) == continued(model, prompt, NEW, guess[:7]) == wanted
    assert continued(model, prompt, NEW, []) == wanted
