"""What transformers says of the tiny checkpoints of this folder: prompts continued greedily, and logits of a prompt."""

import warnings
from dataclasses import replace

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from tests.engine import greedy
from tests.engine.driving import GREEDY, collect, config, drive, prompts, requests
from tests.families.tiny import ALL, build, model_and_config

NEW = 16


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp(name.replace("-", "_")))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def truth(checkpoint):
    """The model, in float32 with plain attention."""
    loaded = {}

    def load(name):
        if name not in loaded:
            model_class, _ = model_and_config(ALL[name][0])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Initializing zero-element tensors")
                loaded[name] = model_class.from_pretrained(
                    checkpoint(name), dtype=torch.float32, attn_implementation="eager"
                ).eval()
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def continued(truth, checkpoint):
    """The common prompts' greedy continuations. The engine guesses them, so that they take a pass for each prompt;
    what it guesses wrong is transformers' all the same."""
    known = {}

    def tokens(name):
        if name not in known:
            node = colocated(ModelSource(str(checkpoint(name)), name), config())
            asked = requests(prompts(), replace(GREEDY, max_tokens=NEW))
            pairs = zip(prompts(), collect(drive(node, asked)), strict=True)
            known[name] = [greedy.continued(truth(name), prompt, NEW, guess) for prompt, guess in pairs]
        return known[name]

    return tokens
