"""Whatever happens between a draft and its verification, and whatever else decides on tokens, changes none of them."""

import random
from dataclasses import replace

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.sampler import Sampler
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.step.host_reader import read_at_once
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.verify import Rows, draw_runs
from afserve.grammars.grammar import of_choice, of_regex, of_schema
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import open_ops
from tests.engine import test_lost_peer
from tests.engine.driving import FAMILIES, collect, config, prompts
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased, lose_the_decoding_one
from tests.engine.test_drafted_answers import Told, answered, asked_of, know, play, told


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_in_mid_draft(name, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    asked = asked_of(random.Random(name), 30)
    wanted = told(play([colocated(source, config())], asked))
    node = colocated(source, config(kv_blocks=12, max_batch_tokens=24, draft="ngram:4"))
    know([node], 0.7, wanted)
    assert told(play([node], asked)) == wanted
    assert node.stats().preemptions and node.stats().drafts.accepted


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_node_that_decodes_is_lost_in_mid_draft(name, tiny_checkpoint):
    """Another one goes on, from what was told so far; runs that were not told yet are drawn again."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    asked = [one for one in asked_of(random.Random(7), 30) if not one.params.pooled]
    wanted = told(play([colocated(source, config())], asked))
    made = config(micro_batches=2, draft="ngram:4")
    world = Phased(LocalCluster.build(source, made, attention=3, experts=2), 1, faulty=0.1, seed=3)
    know(world.cluster.attention, 0.7, wanted)
    lose_the_decoding_one(world, asked, wanted)


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_expert_nodes_are_lost_and_experts_move_in_mid_draft(seed, tiny_checkpoint, expected):
    name = FAMILIES[seed % len(FAMILIES)]
    source = ModelSource(str(tiny_checkpoint(name)), name)
    world = test_lost_peer.World(
        seed, source, 32, 1 + seed % 3, replicas=seed % 2 == 1, delay=seed % 3, draft="ngram:4"
    )
    know(world.cluster.attention, 0.6, {handle: Told(said) for handle, said in enumerate(expected(name))})
    assert collect(world.run()) == [said[:32] for said in expected(name)]
    for node in world.cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0 and not node.owing()
    assert world.losses and sum(node.stats().drafts.accepted for node in world.cluster.attention)


SHAPES = (
    of_schema({"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 2, "maxItems": 9}),
    of_schema({"type": "object", "properties": {"is_reversible": {"type": "boolean"}, "product": {"type": "string"}},
               "required": ["is_reversible", "product"], "additionalProperties": False}),
    of_choice(["carbonate", "carbon", "calcium carbonate"]),
    of_regex("(ab|abc|x){1,6}z"),
)  # fmt: skip


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", [0.3, 0.7, 1.0, "ngram:4", "suffix:16"])
def test_grammars_are_followed_as_without_drafts(drafter):
    source, dice, asked = ModelSource("configs/nano", "nano"), random.Random(5), []
    for number, prompt in enumerate(prompts((3, 8, 5, 13, 4, 9, 6, 17))):
        params = SamplingParams(max_tokens=40, temperature=dice.choice([0.0, 1.0]), seed=number, logprobs=0)
        if number % 3 == 2:
            params = replace(params, repetition_penalty=1.2, min_tokens=2)
        asked.append(GenerationRequest(number, prompt, replace(params, grammar=SHAPES[number % 4])))
    wanted = answered(source, "colocated", asked)
    assert answered(source, "colocated", asked, drafter, wanted) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("draws", [15_000, pytest.param(50_000, marks=pytest.mark.long)])
def test_what_is_drawn_behind_a_draft_is_as_likely_as_without(draws):
    """Two tokens each, and the chi-square of both against their probabilities: of 7 and of 6 degrees of freedom (a
    token cannot come), which pass 30 once in ten thousand times."""
    draft, temperature = 2, 0.8
    logits_NV = torch.randn((2, 8), generator=torch.Generator().manual_seed(1))
    logits_NV[1, 5] = float("-1e9")
    probability_NV = (logits_NV.double() / temperature).softmax(-1)
    sampler = Sampler(open_ops("cpu", 1), StepBuffers(device_of(torch.device("cpu")), 1))
    asked = {}
    for seed in range(draws):
        params = SamplingParams(4, temperature, seed=seed)
        sequence = Sequence.start(GenerationRequest(0, (1,), params), seed, frozenset())
        sequence.draft = [draft]
        asked[seed] = Rows(sequence, 2 * seed, 1)
    drawn = read_at_once(draw_runs(logits_NV.repeat(draws, 1), asked, sampler))
    runs = [run for run in drawn.values() if isinstance(run, tuple)]
    first = [run[0] for run in runs]
    behind = [run[1] for run in runs if len(run) == 2]
    assert len(behind) == first.count(draft) > 0.06 * draws
    for tokens, probability_V in zip((first, behind), probability_NV, strict=True):
        wanted = [len(tokens) * p for p in probability_V.tolist()]
        found = [tokens.count(token) for token in range(8)]
        assert sum((f - w) ** 2 / w for f, w in zip(found, wanted, strict=True) if w > 0) < 30
        assert all(w > 0 or f == 0 for f, w in zip(found, wanted, strict=True))
