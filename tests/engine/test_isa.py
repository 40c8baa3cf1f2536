"""Inside one instruction set tokens are the same in every topology: what `--isa` promises."""

from contextlib import closing

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.kernels.isa import isas_here
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "generic"])  # all other tests run with the best one
def test_topologies_agree(tiny_checkpoint, isa: str) -> None:
    if isa not in isas_here():
        pytest.skip(f"this machine has no {isa}")
    source, asked = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), requests(prompts())
    node = colocated(source, config(isa=isa))
    assert node.isa == isa
    expected = collect(drive(node, asked))
    built = LocalCluster.build(source, config(isa=isa, micro_batches=2), attention=2, experts=3)
    with closing(built) as cluster:
        assert {each.isa for each in cluster.attention} == {isa}
        found = _by_handle(cluster.run(asked))
    assert found == dict(enumerate(expected))


def _by_handle(events) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        found.setdefault(event.handle, []).extend(event.token_ids)
    return found
