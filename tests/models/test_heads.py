"""A head of its own beside tied embeddings: refused with both readings, chosen by a flag, and equal ones are silent."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import CheckpointError, ConfigError
from tests.conftest import TINY
from tests.engine.driving import config, drive, prompts

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NAMES = ("v3-tied-half", "qwen3-tied")


@pytest.fixture
def folder_with(tiny_checkpoint, tmp_path):
    def make(name, change):
        shutil.copy(tiny_checkpoint(name) / "config.json", tmp_path)
        stored = load_file(tiny_checkpoint(name) / "model.safetensors")
        change(stored)
        save_file(
            {key: tensor.contiguous() for key, tensor in stored.items()}, tmp_path / "model.safetensors"
        )
        return tmp_path

    return make


def logprobs(folder, lm_head="auto"):
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    node = colocated(ModelSource(str(folder), "made"), config(lm_head=lm_head))
    (event,) = drive(node, [GenerationRequest(0, prompts()[2], params)])
    return torch.tensor([entry.logprob for entry in event.prompt_logprobs[1:]])


def theirs(name, folder):
    model = getattr(transformers, TINY[name][0] + "ForCausalLM")
    loaded = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = prompts()[2]
    with torch.no_grad():
        truth = loaded(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return truth[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def another_head(stored):
    stored[HEAD] = torch.randn(stored[EMBEDDING].shape, generator=torch.Generator().manual_seed(1))


def one_row_more(stored):
    stored[HEAD] = stored[EMBEDDING].clone()
    stored[HEAD][-1, -1] += 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("change", "rows"), [(another_head, "64 of 64"), (one_row_more, "1 of 64")])
def test_a_head_of_its_own_is_refused_until_one_is_chosen(name, change, rows, folder_with, tiny_checkpoint):
    folder = folder_with(name, change)
    rows = rows.replace("64", f"{load_file(folder / 'model.safetensors')[HEAD].shape[0]:,}")
    with pytest.raises(CheckpointError, match=f"{rows} rows differ") as refused:
        logprobs(folder)
    for words in (HEAD, EMBEDDING, "--lm-head checkpoint", "--lm-head embedding", "tie_word_embeddings"):
        assert words in refused.value.message
    own, tied = logprobs(folder, "checkpoint"), logprobs(folder, "embedding")
    torch.testing.assert_close(own, theirs(name, folder), atol=1e-4, rtol=0)
    assert torch.equal(tied, logprobs(tiny_checkpoint(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_under_either_name_or_both_is_tied_without_a_word(
    name, folder_with, tiny_checkpoint, caplog
):
    def both(stored):
        stored[HEAD] = stored[EMBEDDING].clone()

    def only_head(stored):
        stored[HEAD] = stored.pop(EMBEDDING)

    for change in (both, only_head):
        folder = folder_with(name, change)
        assert torch.equal(logprobs(folder), logprobs(tiny_checkpoint(name)))
        torch.testing.assert_close(logprobs(folder), theirs(name, folder), atol=1e-4, rtol=0)
    assert not caplog.records


@pytest.mark.parametrize("name", ["v3", "qwen3-tied"])
@pytest.mark.parametrize("asked", ["checkpoint", "embedding"])
def test_where_there_is_nothing_to_choose_a_choice_is_refused(name, asked, tiny_checkpoint):
    with pytest.raises(ConfigError, match=f"--lm-head {asked}"):
        logprobs(tiny_checkpoint(name), asked)


def test_random_weights_are_tied_as_config_json_says(tiny_checkpoint):
    node = colocated(ModelSource(str(tiny_checkpoint("qwen3-tied")), "made", load_format="dummy"), config())
    assert drive(node, [GenerationRequest(0, prompts()[2], SamplingParams(max_tokens=1, temperature=0.0))])
