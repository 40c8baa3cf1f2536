"""The engine against transformers: every family, odd shapes, every topology, forced cache hits and preemption."""

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.families.table import load_spec
from afserve.placement.placement import FREE, LayerPlacement, Placement
from tests.conftest import TINY
from tests.engine.driving import FAMILIES, LENGTHS, NEW, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_colocated_greedy_tokens(name, tiny_checkpoint, expected):
    node = colocated(ModelSource(str(tiny_checkpoint(name)), name), config())
    assert collect(drive(node, requests(prompts()))) == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_prefill_logits(name, tiny_checkpoint, oracle):
    """Log-probabilities of every prompt position equal the oracle's to 1e-4 in float32."""
    prompt = prompts()[2]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=5, ignore_eos=True)
    node = colocated(ModelSource(str(tiny_checkpoint(name)), name), config(max_batch_tokens=10))
    (event,) = drive(node, [GenerationRequest(0, prompt, params)])
    with torch.no_grad():
        truth = oracle(name)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    got = [entry.logprob for entry in event.prompt_logprobs[1:]]
    want = truth[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert event.prompt_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(got), want, atol=1e-4, rtol=0)
    value, token = truth[-1].topk(5)
    assert [t for t, _ in event.logprobs[0].top] == token.tolist()
    torch.testing.assert_close(torch.tensor([v for _, v in event.logprobs[0].top]), value, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches"),
    [(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 3), (2, 3, 1), (2, 3, 2), (3, 2, 3)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_topology(name, attention, experts, micro_batches, tiny_checkpoint, expected):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    cluster = LocalCluster.build(
        source, config(micro_batches=micro_batches, max_batch_tokens=12), attention=attention, experts=experts
    )
    assert collect(cluster.run(requests(prompts()))) == expected(name)
    for node in cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0
    rows = [expert.stats().rows for expert in cluster.experts]
    assert all(rows), f"an expert node computed nothing: {rows}"


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_replicated_experts(name, tiny_checkpoint, expected):
    """Every expert on both of two nodes, with uneven shares: replica choice changes no token."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    spec = load_spec(source.path)
    everything = tuple(range(spec.experts))
    shares = tuple(0.25 if e % 2 else 0.7 for e in everything)
    layer = LayerPlacement(
        ((*everything, FREE), (FREE, *everything[::-1])),
        ((*shares, 0.0), (0.0, *(1 - s for s in shares[::-1]))),
    )
    plan = Placement(3, 2, spec.experts, (layer,) * spec.moe_layers)
    cluster = LocalCluster.build(source, config(micro_batches=2), attention=2, experts=2, placement=plan)
    assert collect(cluster.run(requests(prompts()))) == expected(name)


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_prefix_cache_hits(name, tiny_checkpoint, expected):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    cluster = LocalCluster.build(source, config(micro_batches=2), experts=2)
    assert collect(cluster.run(requests(prompts()))) == expected(name)
    events = list(cluster.run(requests(prompts())))
    assert collect(events) == expected(name)
    assert sum(event.cached_tokens for event in events) == 16 + 32  # whole blocks of 8, one token left over
    assert cluster.attention[0].stats().prefix_hits == 48


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_preemption(name, caching, tiny_checkpoint, expected):
    """A pool that holds little more than one sequence: others are thrown out and computed again."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    tight = config(kv_blocks=15, micro_batches=2, prefix_caching=caching, max_batch_tokens=9)
    cluster = LocalCluster.build(source, tight, experts=2)
    assert collect(cluster.run(requests(prompts()))) == expected(name)
    assert cluster.attention[0].stats().preemptions > 0
    cluster.attention[0].check()


def test_cancel_frees_blocks(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    cluster = LocalCluster.build(source, config(micro_batches=2), experts=2)
    for request in requests(prompts()):
        cluster.submit(request)
    for _ in range(9):
        cluster.step()
    for handle in (0, 1, 2, 77):
        cluster.attention[0].cancel(handle)
    reasons = [event.finish_reason for _ in range(50) for event in cluster.step() if event.finish_reason]
    assert set(reasons) <= {"cancelled"}
    assert not cluster.attention[0].busy
    assert cluster.attention[0].stats().kv_blocks_used == 0


def test_expert_load_is_counted(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    node = colocated(source, config())
    drive(node, requests(prompts()))
    spec = load_spec(source.path)
    computed = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    rows = node.take_routed()
    for layer in rows.prefill_LE + rows.decode_LE:
        assert len(layer) == spec.experts
        assert layer.sum() == computed * spec.top_k
    assert (rows.prefill_LE.sum(1) == sum(LENGTHS) * spec.top_k).all()
    assert not node.take_routed(), "rows are told once"


def test_roles_read_only_their_tensors(tiny_checkpoint, tmp_path):
    """Without the expert tensors the attention side still loads, and the other way round."""
    import shutil

    from safetensors.torch import load_file, save_file

    from afserve.comm.m2n.bank import LocalBankLink
    from afserve.errors import CheckpointError

    folder = tiny_checkpoint("v3")
    tensors = load_file(folder / "model.safetensors")
    for role in ("attention", "expert"):
        (tmp_path / role).mkdir()
        shutil.copy(folder / "config.json", tmp_path / role)
        keep = {k: v for k, v in tensors.items() if (".mlp.experts." in k) == (role == "expert")}
        save_file(keep, tmp_path / role / "model.safetensors")
    experts = build_expert_bank(ModelSource(str(tmp_path / "expert"), "e"), [(0, 0, 3)], 1)
    build_attention_node(ModelSource(str(tmp_path / "attention"), "a"), config(), LocalBankLink(experts))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.3\.gate_proj"):
        build_expert_bank(ModelSource(str(tmp_path / "attention"), "a"), [(0, 0, 3)], 1)


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_adaptive_micro_batches_change_no_token(name, tiny_checkpoint, expected):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    cluster = LocalCluster.build(source, config(micro_batches=4, adaptive=True), experts=2)
    for round_number in range(3):
        assert collect(cluster.run(requests(prompts()))) == expected(name), round_number
