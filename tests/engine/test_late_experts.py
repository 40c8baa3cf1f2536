"""Experts whose sum is added behind the next layer, and experts that compute nothing: what is away when, what is sent
and what is told of it. The tokens are those of transformers in `test_oracle.py`."""

import numpy as np
import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, colocated, spec_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError
from afserve.kernels.ops import open_ops
from afserve.models.decoder import DecoderLayer
from afserve.models.router import parted
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

EXPERTS, ZERO, TOP_K = 10, 4, 3
ASKED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, return_routed_experts=True)


@pytest.fixture
def source(tiny_checkpoint):
    return ModelSource(str(tiny_checkpoint("late")), "late")


class NotedLink(LocalBankLink):
    """Keeps what is dispatched."""

    def __init__(self, bank):
        super().__init__(bank)
        self.sent = []

    def dispatch(self, x_TH, expert_TK, weight_TK, *, layer, micro_batch):
        self.sent.append((layer, expert_TK.clone()))
        return super().dispatch(x_TH, expert_TK, weight_TK, layer=layer, micro_batch=micro_batch)


def noted(source, **fields):
    """A node over a link that keeps what it is given, and the link."""
    spec, ops = spec_of(source), open_ops("cpu", 1)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    link = NotedLink(build_expert_bank(source, held, spec.experts, ops=ops))
    return build_attention_node(source, config(**fields), link, ops=ops), link


def test_rows_are_away_while_the_next_layer_is_computed(source, monkeypatch):
    cluster = LocalCluster.build(source, config(), experts=2)
    (node,) = cluster.attention
    layers, run = node._micro_batches[0]._model.layers, DecoderLayer.local_ffn
    seen: dict[int, set[bool]] = {}

    def noting(layer, normed_TH, x_TH):
        seen.setdefault(layers.index(layer), set()).add(node._link.oldest_epoch() is not None)
        return run(layer, normed_TH, x_TH)

    monkeypatch.setattr(DecoderLayer, "local_ffn", noting)
    collect(cluster.run(requests(prompts(), ASKED)))
    assert seen == {layer: {True} for layer in range(4)}
    assert node._link.oldest_epoch() is None


def test_no_choice_that_computes_nothing_is_sent(source):
    node, link = noted(source)
    drive(node, requests(prompts((5, 9)), ASKED))
    sent = torch.cat([expert_TK.flatten() for _, expert_TK in link.sent])
    assert set(sent.unique().tolist()) == {-1, *range(EXPERTS)}
    counted = node.take_routed()
    for layer in range(2):
        rows = torch.cat([expert_TK for number, expert_TK in link.sent if number == layer])
        counts = rows[rows >= 0].bincount(minlength=EXPERTS)
        told = torch.from_numpy(counted.decode_LE + counted.prefill_LE)[layer]
        assert told.shape == (EXPERTS,)
        assert (counts == told).all() if layer == 0 else (counts <= told).all()


def test_of_the_last_layer_only_rows_that_are_read_are_sent(source):
    node, link = noted(source)
    drive(node, requests(prompts((21,)), SamplingParams(max_tokens=1, temperature=0.0)))
    assert [(layer, len(expert_TK)) for layer, expert_TK in link.sent] == [(0, 21), (1, 1)]


def test_prompts_in_chunks_send_nothing_of_the_last_layer_before_their_end(source):
    node, link = noted(source, max_batch_tokens=8)
    drive(node, requests(prompts((21,)), SamplingParams(max_tokens=1, temperature=0.0)))
    assert [layer for layer, _ in link.sent] == [0, 0, 0, 1]


def test_clients_are_told_what_routers_chose(source, oracle):
    """Those that compute nothing too, by their numbers."""
    model = oracle("late")
    events = drive(colocated(source, config()), requests(prompts((9,)), ASKED))
    text = torch.tensor([[*prompts((9,))[0], *collect(events)[0][:-1]]])
    bias = [layer.mlp.router.e_score_correction_bias for layer in model.model.layers]
    with torch.no_grad():
        logits = model(text, output_router_logits=True).router_logits
    wanted = [
        (one.softmax(-1) + b).topk(TOP_K).indices.sort(-1).values for one, b in zip(logits, bias, strict=True)
    ]
    parts = [event.routed for event in events if event.routed is not None]
    given = np.concatenate([np.frombuffer(part.data, part.dtype).reshape(part.shape) for part in parts])
    assert given.max() >= EXPERTS
    assert (np.sort(given, -1) == torch.stack(wanted, 1).numpy()).all()


def test_half_of_a_layer_is_none(source):
    spec = spec_of(source)
    assert (spec.layers, spec.moe_layer_ids, spec.cut(2).layers) == (4, (0, 2), 2)
    for layers in (1, 3):
        with pytest.raises(
            ConfigError, match=f"layers: {layers} ends .* behind the next one; use {layers + 1}$"
        ):
            spec.cut(layers)


def test_a_row_alone_has_its_bits():
    """However many rows are parted with it."""
    dice = torch.Generator().manual_seed(3)
    x_TX, weight_TK = torch.randn(37, 48, generator=dice), torch.rand(37, 11, generator=dice)
    expert_TK = torch.randint(0, EXPERTS + ZERO, (37, 11), generator=dice, dtype=torch.int32)
    many = parted(x_TX, expert_TK, weight_TK, EXPERTS)
    assert many.own_TX is not None
    for row in range(37):
        one = parted(x_TX[row : row + 1], expert_TK[row : row + 1], weight_TK[row : row + 1], EXPERTS)
        assert one.own_TX is not None and torch.equal(one.own_TX[0], many.own_TX[row])
        assert torch.equal(one.expert_TK[0], many.expert_TK[row])
    own_T = (weight_TK.double() * (expert_TK >= EXPERTS)).sum(1)
    torch.testing.assert_close(many.own_TX.double(), x_TX.double() * own_T[:, None], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("expert_dtype", ["int8", "int4"])
def test_rounded_experts_skip_them_too(source, expert_dtype):
    """Over expert nodes as in one process."""
    asked, settings = requests(prompts(), ASKED), config(expert_dtype=expert_dtype, micro_batches=2)
    wanted = collect(drive(colocated(source, settings), asked))
    cluster = LocalCluster.build(source, settings, attention=1, experts=3)
    assert collect(cluster.run(asked)) == wanted
