"""Chosen rows that are fetched from memory of the host: the tokens are those of a cache that has all rows."""

from dataclasses import replace

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.errors import ConfigError
from tests.engine.driving import BRIEF, collect, config, drive, prompts, requests
from tests.engine.test_hand_over import phased
from tests.engine.test_kv_dtype import moving
from tests.engine.tiered import Node

ROWS = 24
# Tokens that choose by themselves and as others chose; layers that attend another one's rows.
NAMES = ("deepseek32-odd", "glm5", "mistral-large4-odd")


@pytest.mark.by_day(2)
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_a_cache_with_all_rows(name, kv_dtype, folder_of):
    source, asked = ModelSource(str(folder_of(name)), name), requests(prompts(), BRIEF)

    def opened(**fields):
        return colocated(source, config(kv_dtype=kv_dtype, kv_near_rows=ROWS, **fields))

    whole = collect(drive(colocated(source, config(kv_dtype=kv_dtype)), asked))
    pieces = opened(max_batch_tokens=12, micro_batches=2)
    assert collect(drive(pieces, asked)) == whole, "prompts in pieces"
    assert collect(drive(pieces, asked)) == whole, "prefixes that were found"
    near = pieces.stats().near
    assert near.found > 0 and near.fetched > 0
    tight = opened(kv_blocks=13, prefix_caching=False)
    assert collect(drive(tight, asked)) == whole and tight.stats().preemptions, "blocks that others had"
    assert collect(drive(opened(draft="ngram:3"), asked)) == whole, "drafts that are written over"
    assert collect(moving(opened(prefix_caching=False), BRIEF)) == whole, "moves"


@pytest.mark.slow
@pytest.mark.parametrize(("host_blocks", "disk"), [(100, False), (0, True)])
def test_blocks_that_come_back_from_below_are_fetched_anew(host_blocks, disk, tmp_path, tiny_checkpoint):
    path, asked = tiny_checkpoint("dsa"), requests(prompts((60, 70)), BRIEF)
    wanted = collect(drive(colocated(ModelSource(str(path), "m"), config()), asked))
    one = Node(path, tmp_path / "kv" if disk else None, host_blocks=host_blocks, kv_near_rows=ROWS)
    for turn in range(3):
        for request, answer in zip(asked, wanted, strict=True):
            events = one.ask(replace(request, handle=10 * turn + request.handle))
            assert collect([replace(event, handle=0) for event in events]) == [answer]
        one.forget()
    stats = one.stats()
    one.close()
    assert stats.hit_tokens + stats.host.hit_tokens >= 2 * 2 * 56


@pytest.mark.slow
def test_prompts_are_handed_over_to_nodes_that_fetch(tiny_checkpoint):
    path, asked = tiny_checkpoint("dsa"), requests(prompts((60, 70, 20)), BRIEF)
    wanted = collect(drive(colocated(ModelSource(str(path), "m"), config()), asked))
    world = phased(path, "dsa", 1, 1, 1, kv_near_rows=ROWS)
    for request in asked:
        world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    assert world.said == dict(enumerate(wanted))
    assert all(end.node.stats().near.fetched for end in world.nodes)


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("qwen3", {}, "no layer of this model has latents of which an indexer chooses; leave it out"),
        ("dsa", {"kv_near_rows": 8}, "a token attends 9; at least as many"),
        ("dsa", {"tensor_parallel": 2}, "with --tensor-parallel each device would have a copy of all rows"),
    ],
)
def test_what_cannot_be_is_refused(name, fields, told, tiny_checkpoint):
    with pytest.raises(ConfigError, match=f"^--kv-near-rows [0-9]+: {told}"):
        colocated(ModelSource(str(tiny_checkpoint(name)), name), config(**{"kv_near_rows": ROWS, **fields}))
