"""Models out of GGUF files against the folders that they were made of: the same numbers and the same tokens."""

import pytest
import torch
from safetensors.torch import load_file

from afserve.config import ModelSource
from afserve.engine.build import colocated, naming_of, spec_of, tensors_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.models.gguf.folder import unfold
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.models.gguf.conftest import TINY
from tests.models.gguf.writing import convert

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def asked():
    return requests(prompts(), GREEDY)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def unfolded(checkpoint, tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            path = tmp_path_factory.mktemp("gguf")
            made[name] = unfold(convert(checkpoint(name), path / f"{name}.gguf"), path / "folder")
        return made[name]

    return folder


@pytest.mark.parametrize("name", TINY)
def test_every_number_is_that_of_the_folder(name, checkpoint, unfolded):
    """By the names of the family; tensors of all experts are looked at by what a node computes of them."""
    source = ModelSource(str(unfolded(name)), name)
    spec = spec_of(source)
    tensors = tensors_of(source, spec, torch.device("cpu"))
    stored = load_file(checkpoint(name) / "model.safetensors")
    apart = {
        key: x
        for key, x in stored.items()
        if ".experts.gate_up" not in key and ".experts.down_proj" not in key
    }
    assert naming_of(spec).stacked is None
    for key, x in apart.items():
        torch.testing.assert_close(
            tensors.tensor(key, tuple(x.shape), torch.float32), x, rtol=0, atol=0, msg=key
        )


@pytest.mark.parametrize("name", TINY)
def test_the_tokens_of_the_folder(name, checkpoint, unfolded):
    both = [ModelSource(str(path), name) for path in (checkpoint(name), unfolded(name))]
    wanted, got = (collect(drive(colocated(source, config()), asked())) for source in both)
    assert got == wanted
    cluster = LocalCluster.build(
        both[1], config(micro_batches=2, max_batch_tokens=12), attention=2, experts=3
    )
    assert collect(cluster.run(asked())) == wanted
