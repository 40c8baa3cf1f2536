"""What layers keep, whatever it is, goes with its blocks: one node computes prompts and hands them over, the node that
decodes is lost in the middle of answers, and another goes on with the tokens of transformers."""

import pytest

from afserve.config import ModelSource
from tests.engine.driving import config
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.families.conftest import NEW
from tests.families.test_against_transformers import asked


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "kimi-linear",
        "ling",
        "granite4",
        "nemotron",
        "gemma4",
        "mimo",
        "glm5",
        "longcat",
        "longcat-ngram",
        "minimax-m3",
        "mistral-large4-odd",
    ],
)
def test_a_node_that_decodes_is_lost(name, checkpoint, continued):
    source = ModelSource(str(checkpoint(name)), name)
    cluster = LocalCluster.build(source, config(micro_batches=2, max_batch_tokens=12), attention=3, experts=2)
    world = Phased(cluster, 1)
    (prefill,), (decode, other) = world.prefilling, world.decoding
    for request in asked():
        world.submit(request, prefill, decode)
    while sum(map(len, world.said.values())) < NEW:
        world.round()
    world.lose(decode)
    moved = [handle for handle in world.asked if len(world.said[handle]) < NEW]
    for handle in moved:
        world.move(handle, prefill, other)
    world.run()
    assert [world.said[handle] for handle in range(3)] == continued(name)
    assert len(moved) > 1 and other.moves.stats().handed and other.moves.stats().bytes_received
