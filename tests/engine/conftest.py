"""What transformers says: greedy continuations of the common prompts, per tiny checkpoint, made once."""

import pytest
import torch

from tests.engine.driving import NEW, prompts


@pytest.fixture(scope="session")
def expected(oracle):
    """Greedy continuations of the prompts by transformers, per checkpoint."""
    known = {}

    def tokens(name):
        if name not in known:
            model = oracle(name)
            with torch.no_grad():
                known[name] = [
                    model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[
                        0, len(p) :
                    ].tolist()
                    for p in prompts()
                ]
        return known[name]

    return tokens
