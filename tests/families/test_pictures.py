"""Prompts with pictures: the tokens of transformers, wherever and in whatever pieces they are computed."""

from dataclasses import replace

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import OverloadedError, RequestError
from tests.engine.driving import collect, config, drive, prompts
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.pretended_devices import colocated_on
from tests.families.pictures import SIGHTS

ASKED = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
WORDS = [list(words) for words in prompts((5, 11, 3, 19))]
# Text alone, a tile in the middle, a picture of three tiles and another one behind each other, one at the end.
PARTS = [
    [WORDS[3]],
    [WORDS[0], 1, WORDS[1]],
    [WORDS[2], 2, [9], 3, [9, 8], 4, WORDS[0], 1, WORDS[2]],
    [WORDS[1], 5, [3]],
]


@pytest.fixture(scope="module", params=SIGHTS)
def sight(request):
    return SIGHTS[request.param]


@pytest.fixture(scope="module")
def source(sight, tmp_path_factory):
    return ModelSource(str(sight.build(tmp_path_factory.mktemp("seeing"))), "seeing")


@pytest.fixture(scope="module")
def asked(sight):
    return [sight.request(handle, parts, ASKED) for handle, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def truth(sight, source, asked):
    guessed = collect(drive(colocated(source, config(block_size=16)), asked))
    seeing = sight.seeing(source.path)
    return [seeing.continued(one, guess) for one, guess in zip(asked, guessed, strict=True)]


@pytest.mark.slow
def test_colocated_in_one_piece_in_many_and_preempted(source, asked, truth):
    assert collect(drive(colocated(source, config(block_size=16)), asked)) == truth
    node = colocated(source, config(block_size=16, max_batch_tokens=7, kv_blocks=5))
    assert collect(drive(node, asked)) == truth
    assert node.stats().preemptions


@pytest.mark.slow
def test_log_probabilities_of_a_prompt(sight, source):
    """Of tokens before, among and behind pictures; rows of pictures are told, too."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    request = sight.request(0, PARTS[2], params)
    (event,) = drive(colocated(source, config(block_size=16, max_batch_tokens=24)), [request])
    ids = torch.tensor([request.prompt_ids])
    with torch.no_grad():
        seeing = sight.seeing(source.path)
        seeing.see(request)
        wanted = seeing(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    found = torch.tensor([one.logprob for one in event.prompt_logprobs[1:]])
    torch.testing.assert_close(found, wanted.gather(1, ids[0, 1:, None])[:, 0], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_drafts_behind_pictures_are_verified(sight, source, asked, truth):
    """With what is right expected as the answer, but for a token, and guessed by a layer."""
    expected = [(*said[:7], said[7] ^ 1, *said[8:]) for said in truth]
    predicted = [replace(one, prediction=said) for one, said in zip(asked, expected, strict=True)]
    for draft in sight.drafts:
        node = colocated(source, config(block_size=16, max_batch_tokens=24, kv_blocks=8, draft=draft))
        assert collect(drive(node, predicted)) == truth
        drafts = node.stats().drafts
        assert drafts.accepted and drafts.accepted < drafts.tokens


@pytest.mark.slow
def test_two_attention_and_three_expert_nodes_and_two_devices(source, asked, truth):
    devices = config(block_size=16, tensor_parallel=2, max_batch_tokens=24)
    assert collect(drive(colocated_on(source, devices), asked)) == truth
    many = config(block_size=16, micro_batches=2, max_batch_tokens=12)
    cluster = LocalCluster.build(source, many, attention=2, experts=3)
    assert collect(cluster.run(asked)) == truth


@pytest.mark.slow
def test_prefill_nodes_are_given_the_picture(source, asked, truth):
    small = config(block_size=16, micro_batches=2, max_batch_tokens=32)
    world = Phased(LocalCluster.build(source, small, attention=2, experts=2), 1)
    for request in asked:
        world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    assert [world.said[handle] for handle in range(len(PARTS))] == truth
    moved = [end.moves.stats() for end in world.nodes]
    assert sum(one.handed for one in moved) == sum(one.prompts for one in moved) == len(PARTS)
    assert not sum(one.handed_short for one in moved) and moved[1].bytes_received


@pytest.mark.slow
def test_blocks_are_found_by_the_same_picture_alone(sight, source):
    """The tokens before the first tile are the same whatever follows; behind it everything depends on it."""
    node = colocated(source, config(block_size=4, max_batch_tokens=32))
    head, words = WORDS[1][:8], WORDS[0]
    first = drive(node, [sight.request(0, [head, 1, words, 2, words], ASKED)])

    def again(handle, *parts):
        request = sight.request(handle, list(parts), ASKED)
        events = drive(node, [request])
        said = [token for event in events for token in event.token_ids]
        fresh = drive(colocated(source, config(block_size=4)), [request])
        assert said == [token for event in fresh for token in event.token_ids]
        return events[0].cached_tokens, said

    said = [token for event in first for token in event.token_ids]
    assert again(1, head, 1, words, 2, words) == (32, said), "all whole blocks but one token"
    assert again(2, head, 1, words, 3, words)[0] == 20, "the second tile begins in the sixth block"
    cached, other = again(3, head, 4, words, 2, words)
    assert cached == 8 and other != said


def test_what_is_no_picture_of_this_model_is_refused(sight, source, monkeypatch):
    node = colocated(source, config(block_size=16))
    (fine,) = sight.request(0, [WORDS[0], 1, WORDS[0]], ASKED).tiles
    request = sight.request(0, [WORDS[0], 1, WORDS[0]], ASKED)
    for odd, words in (
        (replace(fine, start=4), "the 9 tokens from 4 on are not 210 all"),
        (replace(fine, start=900), "from 900 on"),
        (replace(fine, pixels=fine.pixels[1:]), "one has 1727 bytes, 24 pixels wide"),
    ):
        with pytest.raises(RequestError, match=words):
            node.submit(replace(request, tiles=(odd,)))
    with pytest.raises(RequestError, match="another tile's"):
        node.submit(replace(request, tiles=(fine, fine)))
    monkeypatch.setattr("afserve.engine.scheduling.request_limits.MOST_HELD", 4000)
    node.submit(request)
    node.submit(replace(request, handle=1))
    with pytest.raises(OverloadedError, match="3456 bytes of pictures are open, at most 4000"):
        node.submit(replace(request, handle=2))
    assert len(collect(drive(node, []))) == 2


def test_others_go_on_while_a_picture_is_encoded(source, asked, truth, monkeypatch):
    """All in one micro-batch: a step lies between two turns of a tile, which ends a turn after each of its heads."""
    monkeypatch.setattr("afserve.models.vision.tower._PAIRS", 1)
    node = colocated(source, config(block_size=16, micro_batches=1))
    node.submit(asked[0])
    node.submit(asked[1])
    said = {0: [], 1: []}
    while not said[1]:
        for event in node.step():
            said[event.handle] += event.token_ids
    assert len(said[0]) >= 6
    for event in drive(node, []):
        said[event.handle] += event.token_ids
    assert [said[0], said[1]] == [list(one) for one in truth[:2]]
