"""Drafts of a checkpoint's layer beside memory in tiers: below the KV cache, and of experts."""

from dataclasses import replace

import pytest

from afserve.engine.build import colocated, spec_of
from afserve.engine.scheduling.request import SamplingParams
from tests.engine.driving import collect, config, drive
from tests.engine.local_cluster import LocalCluster
from tests.engine.test_expert_memory import memory_for
from tests.engine.test_mtp import NANO, ROOMY, SOURCE, held_out
from tests.engine.tiered import Node

PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(("host_blocks", "disk"), [(100, False), (0, True), (4, True)])
def test_blocks_that_come_back_have_the_layers_keys(host_blocks, disk, tmp_path):
    asked = held_out(2, 120, PARAMS)
    wanted = collect(drive(colocated(SOURCE, config(**ROOMY)), asked))
    one = Node(NANO, tmp_path / "kv" if disk else None, host_blocks=host_blocks, **ROOMY, draft="mtp:1")
    shares = []
    for turn in range(2):
        before = one.engine.stats().drafts
        for request, answer in zip(asked, wanted, strict=True):
            events = one.ask(replace(request, handle=10 * turn + request.handle))
            assert collect([replace(event, handle=0) for event in events]) == [answer]
        drafts = one.engine.stats().drafts
        shares.append((drafts.accepted - before.accepted) / (drafts.tokens - before.tokens))
        one.forget()
    stats = one.stats()
    one.close()
    assert stats.hit_tokens + stats.host.hit_tokens >= 2 * 112 and not stats.restores_short
    assert abs(shares[1] - shares[0]) < 0.05, "what was written to them is what the layer reads"


@pytest.mark.slow
def test_the_layers_experts_take_turns_in_memory_like_the_others():
    asked = held_out(2, 40, PARAMS)
    wanted = collect(drive(colocated(SOURCE, config(**ROOMY)), asked))
    settings = config(**ROOMY, draft="mtp:2")
    spec = spec_of(SOURCE, settings.drafts())
    cluster = LocalCluster.build(
        SOURCE, settings, attention=1, experts=2, expert_memory=memory_for(SOURCE, spec.top_k + 2)
    )
    assert collect(cluster.run(asked)) == wanted
    drafts = cluster.attention[0].stats().drafts
    cluster.close()
    assert drafts.accepted > 0.4 * drafts.tokens > 0
