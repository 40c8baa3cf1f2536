"""Models out of GGUF files against the folders that they were made of: the same numbers and the same tokens."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import afserve
from afserve.config import ModelSource
from afserve.drafts import DraftChoice
from afserve.engine.build import build_expert_bank, colocated, naming_of, spec_of, tensors_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.launch.plan.drafting import planned_spec
from afserve.models.gguf.folder import unfold
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.models.gguf.conftest import TINY
from tests.models.gguf.writing import convert, described, letters, mxfp4, q4_0, q8_0, renamed, stored, write

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def asked():
    return requests(prompts(), GREEDY)


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
    rounded = 1e-6 if name == "qwen3.5" else 0  # what is stored plus one, or as an exponential
    for key, x in apart.items():
        torch.testing.assert_close(
            tensors.tensor(key, tuple(x.shape), torch.float32), x, rtol=0, atol=rounded, msg=key
        )


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_the_tokens_of_the_folder(name, checkpoint, unfolded):
    both = [ModelSource(str(path), name) for path in (checkpoint(name), unfolded(name))]
    wanted, got = (collect(drive(colocated(source, config()), asked())) for source in both)
    assert got == wanted
    cluster = LocalCluster.build(
        both[1], config(micro_batches=2, max_batch_tokens=12), attention=2, experts=3
    )
    assert collect(cluster.run(asked())) == wanted


QUANTISED = {"Q8_0": q8_0, "Q4_0": q4_0, "MXFP4": mxfp4}


@pytest.fixture(scope="module")
def both(checkpoint, tmp_path_factory):
    """A file whose matrices are in blocks, or its experts alone, and one with the numbers that the blocks stand for."""

    def made(name, kind, experts_only):
        path = tmp_path_factory.mktemp("both")

        def chosen(key, x):
            wanted = key.endswith("_exps.weight") if experts_only else "ffn_gate_inp" not in key
            return wanted and x.dim() > 1 and x.shape[-1] % 32 == 0

        def pair(key, x):
            return QUANTISED[kind](x) if chosen(key, x) else (stored(x), x)

        packed = convert(checkpoint(name), path / "packed.gguf", lambda key, x: pair(key, x)[0])
        plain = convert(checkpoint(name), path / "plain.gguf", lambda key, x: stored(pair(key, x)[1]))
        return [
            ModelSource(str(unfold(file, path / file.stem)), name, dtype="float32")
            for file in (packed, plain)
        ]

    return made


def logprobs(source):
    (prompt,) = prompts((33,))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    (event,) = drive(colocated(source, config()), requests([prompt], params))
    return torch.tensor([entry.logprob for entry in event.prompt_logprobs[1:]])


@pytest.mark.parametrize("name", TINY)
def test_blocks_are_the_numbers_that_they_stand_for(name, both):
    packed, plain = (logprobs(source) for source in both(name, "Q8_0", experts_only=False))
    torch.testing.assert_close(packed, plain, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gptoss"])
def test_experts_stay_as_they_are_stored(name, kind, both):
    """Codes times scales are summed in another order than plain numbers are."""
    packed, plain = both(name, kind, experts_only=True)
    spec = spec_of(packed)
    assert spec.quantization.layout == kind.lower() and spec_of(plain).quantization.layout == "mixed"
    bits = 4.5  # a scale of 16 bits for 32 codes
    assert spec.quantization.expert_bits == bits
    assert build_expert_bank(packed, [(0, 0, 0)], 1).expert_bytes == int(spec.expert_parameters() * bits / 8)
    torch.testing.assert_close(logprobs(packed), logprobs(plain), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_drafts_of_its_layer_of_multi_token_prediction(tmp_path):
    """The bundled model as a file, its embedding in blocks, and as a folder, with the numbers that those stand for; its
    layer has copies of embedding and head beside it, which nothing reads."""
    nano = Path(afserve.__file__).parent / "configs" / "nano"
    folder, file = shutil.copytree(nano, tmp_path / "numbers"), "model.safetensors"
    whole = load_file(nano / file)
    blocks, numbers = q8_0(whole["model.embed_tokens.weight"].float())
    save_file(whole | {"model.embed_tokens.weight": numbers.bfloat16()}, folder / file)
    tensors = {name: stored(x) for name, x in renamed(nano).items()} | {"token_embd.weight": blocks}
    write(tmp_path / "nano.gguf", {**described(nano, predictors=True), **letters(2048)}, tensors)
    made = unfold(tmp_path / "nano.gguf", tmp_path / "folder")
    plain = colocated(ModelSource(str(folder), "nano"), config(draft="mtp:1"))
    wanted = collect(drive(plain, asked()))
    source = ModelSource(str(made), "nano")
    assert planned_spec(source, DraftChoice.parse("auto")).predictors == 1
    node = colocated(source, config(draft="mtp:1"))
    assert collect(drive(node, asked())) == wanted
    assert node.stats().drafts.accepted == plain.stats().drafts.accepted > 0
