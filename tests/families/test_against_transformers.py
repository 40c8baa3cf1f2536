"""Every family against transformers: logits of a prompt, and greedy tokens however the engine is cut."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.families.conftest import NEW
from tests.families.tiny import TINY

GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def asked():
    return requests(prompts(), GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_logits_of_a_prompt_in_chunks(name, checkpoint, truth):
    prompt = prompts()[2]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    node = colocated(ModelSource(str(checkpoint(name)), name), config(max_batch_tokens=10))
    (event,) = drive(node, [GenerationRequest(0, prompt, params)])
    with torch.no_grad():
        wanted = truth(name)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    got = torch.tensor([entry.logprob for entry in event.prompt_logprobs[1:]])
    expected = wanted[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(("attention", "experts", "micro_batches"), [(1, 1, 1), (2, 3, 2)])
@pytest.mark.parametrize("name", TINY)
def test_topologies_and_cached_prefixes(name, attention, experts, micro_batches, checkpoint, continued):
    """The second round finds the prompts' whole blocks in the cache."""
    source = ModelSource(str(checkpoint(name)), name)
    cluster = LocalCluster.build(
        source, config(micro_batches=micro_batches, max_batch_tokens=12), attention=attention, experts=experts
    )
    assert collect(cluster.run(asked())) == continued(name)
    again = list(cluster.run(asked()))
    assert collect(again) == continued(name)
    if attention == 1:
        assert sum(event.cached_tokens for event in again) == 16 + 32


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_preemption_and_a_move_between_nodes(name, checkpoint, continued):
    """A node has blocks for one of its two requests. And a request goes on at another attention node with the tokens
    that it has so far. Nobody can tell."""
    source = ModelSource(str(checkpoint(name)), name)
    cluster = LocalCluster.build(
        source, config(kv_blocks=7, micro_batches=2, max_batch_tokens=9), attention=2, experts=2
    )
    assert collect(cluster.run(asked())) == continued(name)
    assert cluster.attention[0].stats().preemptions > 0
    cluster.attention[0].check()
    (first, second), request = cluster.attention, asked()[2]
    first.submit(request)
    tokens: list[int] = []
    while len(tokens) < NEW // 2:
        tokens += [token for event in cluster.step() for token in event.token_ids]
    first.cancel(request.handle)
    while first.busy:
        cluster.step()
    second.submit(replace(request, generated=tuple(tokens)))
    while second.busy:
        tokens += [token for event in cluster.step() for token in event.token_ids]
    assert tokens == continued(name)[2]


@pytest.mark.slow
def test_experts_of_qwen3_5_in_tensors_of_all(checkpoint, continued, tmp_path):
    """What some checkpoints of a family have stacked gives the tokens of those that have it apart."""
    stored = load_file(checkpoint("qwen3.5") / "model.safetensors")
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [stored.pop(f"{stem}.{expert}.{part}_proj.weight") for expert in range(7)]
            for part in ("gate", "up", "down")
        )
        stored[f"{stem}.gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), 1)
        stored[f"{stem}.down_proj"] = torch.stack(downs)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint("qwen3.5") / "config.json").read_text())
    cluster = LocalCluster.build(ModelSource(str(tmp_path), "stacked"), config(), attention=1, experts=2)
    assert collect(cluster.run(asked())) == continued("qwen3.5")


@pytest.mark.slow
def test_a_bias_that_checkpoints_of_ax_k1_leave_out_is_zero(checkpoint, tmp_path):
    """Released ones route without it."""
    stored = load_file(checkpoint("axk1") / "model.safetensors")
    biases = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    found = []
    for folder, tensors in (
        ("zero", stored | {name: torch.zeros_like(stored[name]) for name in biases}),
        ("gone", {name: tensor for name, tensor in stored.items() if name not in biases}),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text((checkpoint("axk1") / "config.json").read_text())
        node = colocated(ModelSource(str(tmp_path / folder), folder), config())
        found.append(collect(drive(node, asked())))
    assert found[0] == found[1]
