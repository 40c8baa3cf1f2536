"""What transformers says of the tiny checkpoints of this folder: prompts continued greedily, and logits of a prompt."""

import warnings

import pytest
import torch

from tests.engine.driving import prompts
from tests.families.tiny import TINY, build

NEW = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products of a few rows are slower on two threads, and much slower where others use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    import transformers

    loaded = {}

    def load(name):
        if name not in loaded:
            model_class = getattr(transformers, TINY[name][0] + "ForCausalLM")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Initializing zero-element tensors")
                loaded[name] = model_class.from_pretrained(
                    checkpoint(name), dtype=torch.float32, attn_implementation="eager"
                ).eval()
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def continued(truth):
    """The common prompts' greedy continuations."""
    known = {}

    def tokens(name):
        if name not in known:
            model = truth(name)
            with torch.no_grad():
                known[name] = [
                    model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[
                        0, len(p) :
                    ].tolist()
                    for p in prompts()
                ]
        return known[name]

    return tokens
