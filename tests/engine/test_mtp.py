"""Drafts by a checkpoint's layer of multi-token prediction: the same tokens in fewer steps, wherever its layers run."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from afserve.config import ModelSource
from afserve.drafts import NO_DRAFTS, DraftChoice
from afserve.engine.build import colocated
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.step.stack_runner import StackRunner
from afserve.errors import ConfigError
from afserve.launch.plan.drafting import planned_spec
from tests.engine.driving import collect, config, drive
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.test_drafted_answers import PLACES, answered, asked_of

NANO = Path(__file__).parents[2] / "configs" / "nano"
SOURCE = ModelSource(str(NANO), "nano")
ROOMY = {"max_model_len": 512, "kv_blocks": 128, "block_size": 16, "max_batch_tokens": 128}


def held_out(count, tokens, params):
    """Beginnings of texts that nano never saw."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    texts = [*json.loads((NANO / "heldout.json").read_text()).values()][:count]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False).ids[:tokens]) for text in texts]
    return [GenerationRequest(i, prompt, params) for i, prompt in enumerate(ids)]


@pytest.mark.slow
def test_nano_drafts_four_of_five_tokens_right_and_answers_the_same():
    asked = held_out(6, 120, SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True))
    plain, node = colocated(SOURCE, config(**ROOMY)), colocated(SOURCE, config(**ROOMY, draft="mtp:3"))
    assert collect(drive(node, asked)) == collect(drive(plain, asked))
    drafts = node.stats().drafts
    assert drafts.tokens > 2 * drafts.verified > 100
    assert drafts.accepted >= 0.75 * drafts.tokens
    assert node.stats().steps < 0.5 * plain.stats().steps


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_all_is_told_as_without_drafts(place):
    """Of requests of all kinds, in a cache that is too small for them: some are preempted in mid-draft."""
    asked = asked_of(random.Random(5), 24)
    plain = answered(SOURCE, place, asked, kv_blocks=26, max_batch_tokens=24)
    assert answered(SOURCE, place, asked, "mtp:3", kv_blocks=26, max_batch_tokens=24) == plain


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_layer_with_an_indexer_of_its_own_drafts(place, tiny_checkpoint, tmp_path):
    """Its index keys lie in the cache as those of the others do, and tokens are those without it."""
    folder = tmp_path / "dsa"
    shutil.copytree(tiny_checkpoint("dsa"), folder)
    told = json.loads((folder / "config.json").read_text())
    last, hidden = told["num_hidden_layers"], told["hidden_size"]
    (folder / "config.json").write_text(json.dumps(told | {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    stem, further = f"model.layers.{last - 1}.", f"model.layers.{last}."
    alike = {name: one for name, one in tensors.items() if name.startswith(stem)}
    tensors |= {name.replace(stem, further): one.clone() for name, one in alike.items()}
    norms = "enorm", "hnorm", "shared_head.norm"
    tensors |= {f"{further}{name}.weight": torch.ones(hidden) for name in norms}
    tensors[f"{further}eh_proj.weight"] = torch.eye(hidden).repeat(1, 2)
    save_file(tensors, folder / "model.safetensors")
    source, asked = ModelSource(str(folder), "dsa"), asked_of(random.Random(5), 12)
    plain = answered(source, place, asked, kv_blocks=40, max_batch_tokens=24)
    for near_rows in (0, 16):
        drafted = answered(
            source, place, asked, "mtp:3", kv_blocks=40, max_batch_tokens=24, kv_near_rows=near_rows
        )
        assert drafted == plain
    assert planned_spec(source, DraftChoice.parse("mtp")).kv_bytes_per_token(4) == 4 * (5 * 28 + 4 * 12)


@pytest.mark.slow
def test_steps_may_be_one_call_over_an_exchange():
    """Which has the layers of a step alone; the layer that drafts comes behind it."""
    from tests.engine.test_exchange import World, run  # which is skipped where there is no native library

    asked = held_out(2, 60, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    wanted = collect(drive(colocated(SOURCE, config(**ROOMY)), asked))
    world = World(SOURCE, config(**ROOMY, draft="mtp:2"), experts=2)
    with world.serving() as node:
        found = run(node, asked)
    world.close()
    assert found == wanted and node.stats().drafts.accepted > 0


@pytest.mark.slow
def test_what_was_handed_over_or_found_is_drafted_for_as_well():
    """The layer's keys of a prompt come with its blocks."""
    asked = held_out(4, 120, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    node = colocated(SOURCE, config(**ROOMY, draft="mtp:1"))
    wanted = collect(drive(node, asked))
    alone = node.stats().drafts
    assert collect(drive(node, asked)) == wanted and node.stats().prefix_hits > 0
    found = node.stats().drafts
    cluster = LocalCluster.build(SOURCE, config(**ROOMY, draft="mtp:1"), attention=2, experts=1)
    world = Phased(cluster, 1)
    for request in asked:
        world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    assert [world.said[request.handle] for request in asked] == wanted
    handed = world.decoding[0].node.stats().drafts
    cluster.close()
    assert world.decoding[0].moves.stats().handed == len(asked)
    for tokens, accepted in [
        (found.tokens - alone.tokens, found.accepted - alone.accepted),
        (handed.tokens, handed.accepted),
    ]:
        assert abs(accepted / tokens - alone.accepted / alone.tokens) < 0.05


def test_rows_of_the_layer_are_counted_with_those_of_the_others():
    (one,) = held_out(1, 40, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    node = colocated(SOURCE, config(**ROOMY, draft="mtp:2"))
    drive(node, [one])
    routed = node.take_routed()
    rows = (routed.prefill_LE.sum(1) // 4).tolist(), (routed.decode_LE.sum(1) // 4).tolist()
    assert [len(set(each[:-1])) for each in rows] == [1, 1] and len(rows[0]) == 5
    assert rows[0][-1] == rows[0][0], "a pass over the prompt"
    assert rows[1][-1] > rows[1][0], "a pass over each step, and a row for the second token of a draft"


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("least", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_in_one_call_are_those_of_a_pass_for_each_token(dtype, least, monkeypatch):
    """Tokens, their likelihoods and the rows that experts got."""
    asked = held_out(3, 40, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    source = ModelSource(SOURCE.path, SOURCE.name, dtype=dtype)

    def drafted(*, at_once):
        told, guess = [], LayerDrafter.guess

        def noted(drafter, sequence, most):
            draft = guess(drafter, sequence, most)
            likely = [round(p, 4) for p in draft.confidence]
            told.append((sequence.order, len(sequence.tokens), [*draft.tokens], likely))
            return draft

        with monkeypatch.context() as patch:
            patch.setattr(LayerDrafter, "guess", noted)
            if not at_once:
                patch.setattr(StackRunner, "chain", lambda runner: None)
            node = colocated(source, config(**ROOMY, draft="mtp:4"))
            for batch in node._micro_batches:
                assert batch._follower is not None
                batch._follower.drafter.least = least
            tokens = collect(drive(node, asked))
        routed = node.take_routed()
        return tokens, told, routed.decode_LE.tolist(), routed.prefill_LE.tolist()

    found = drafted(at_once=True)
    assert found == drafted(at_once=False)
    lengths = {len(tokens) for _, _, tokens, _ in found[1]}
    assert (4 in lengths) and (least == 0.0 or len(lengths) > 2)


def copy_of_nano(folder, **fields):
    """With other fields in its config.json, and without the layer's tensors."""
    shutil.copytree(NANO, folder)
    told = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(told))
    tensors = load_file(folder / "model.safetensors")
    left = {name: one for name, one in tensors.items() if not name.startswith("model.layers.5.")}
    save_file(left, folder / "model.safetensors")
    return ModelSource(str(folder), "copy")


def test_a_model_without_such_a_layer_is_refused_by_name(tiny_checkpoint, tmp_path):
    unsaid = copy_of_nano(tmp_path / "unsaid", num_nextn_predict_layers=0)
    for source, told in [
        (ModelSource(str(tiny_checkpoint("qwen3")), "q"), "known for deepseek_v3, .*not for qwen3_moe"),
        (ModelSource(str(NANO), "nano", load_format="dummy", layers=3), "--layers leaves 3"),
        (unsaid, "num_nextn_predict_layers is 0 or missing"),
        (copy_of_nano(tmp_path / "lost"), r"has no model.layers.5.eh_proj.weight"),
    ]:
        with pytest.raises(ConfigError, match=told):
            planned_spec(source, DraftChoice.parse("mtp"))
        assert planned_spec(source, DraftChoice.parse("auto")).predictors == 0
        assert planned_spec(source, DraftChoice.parse("ngram")).predictors == 0
    assert (
        planned_spec(SOURCE, DraftChoice.parse("mtp:2")).moe_layers
        == planned_spec(SOURCE, NO_DRAFTS).moe_layers + 1
    )
