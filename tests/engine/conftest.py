"""What transformers says: greedy continuations of the common prompts, per tiny checkpoint, made once."""

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from tests.conftest import TINY
from tests.engine.driving import NEW, collect, config, drive, prompts, requests
from tests.engine.greedy import continued
from tests.families.tiny import build


@pytest.fixture
def folder_of(tmp_path, tiny_checkpoint):
    """A tiny checkpoint by name, of the first families or of the later ones."""
    return lambda name: tiny_checkpoint(name) if name in TINY else build(name, tmp_path)


@pytest.fixture(scope="session")
def expected(oracle, tiny_checkpoint):
    """Greedy continuations of the prompts by transformers, per checkpoint. The engine guesses them, so that they take
    a pass for each prompt; what it guesses wrong is transformers' all the same."""
    known = {}

    def tokens(name):
        if name not in known:
            guesses = collect(
                drive(colocated(ModelSource(str(tiny_checkpoint(name)), name), config()), requests(prompts()))
            )
            pairs = zip(prompts(), guesses, strict=True)
            known[name] = [continued(oracle(name), prompt, NEW, guess) for prompt, guess in pairs]
        return known[name]

    return tokens
