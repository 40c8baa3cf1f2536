"""What a node has left on the disk is read by another one of its host once it has ended, and by nobody before."""

from dataclasses import replace

import pytest

from afserve.clock import FakeClock
from afserve.comm.disk.workers import DiskWorkers
from afserve.engine.kv.inherited import SECONDS, Inheritance
from afserve.engine.kv.kept_keys import KeptKeys
from tests.engine.driving import collect, prompts, requests
from tests.engine.tiered import Node, rest_of

LIMIT = 1 << 20


@pytest.fixture
def nodes(tmp_path, tiny_checkpoint):
    opened: list[Node] = []

    def build():
        opened.append(Node(tiny_checkpoint("qwen3"), tmp_path / "disk"))
        one = opened[-1]
        assert one.disk is not None
        one.engine.told.look_below(one.tiers.holds, KeptKeys(one.disk.store.folder / "keys"))
        return one

    yield build
    for one in opened:
        if one.disk is not None:
            one.close()


def begun(store):
    workers = DiskWorkers(store)
    workers.start()
    return workers


def heir(one, said):
    clock = FakeClock(5.0)
    parts = one.tiers, one.engine.blocks, one.engine.told, clock, said.append
    return Inheritance(one.disk.store, LIMIT, begun, *parts), clock


@pytest.mark.slow
def test_blocks_of_a_node_that_ended_are_found_by_another_of_its_host(nodes, expected):
    gone, stays = nodes(), nodes()
    assert gone.disk.store.folder != stays.disk.store.folder
    asked, answer = requests(prompts())[2], expected("qwen3")[2]
    gone.ask(asked)
    gone.engine.told.look()
    keys = set(gone.engine.told.prefixes.all())
    said: list[str] = []
    inherits, clock = heir(stays, said)
    clock.advance(SECONDS)
    inherits.look()
    assert not said, "its node still has it"
    gone.close()
    gone.disk = None
    inherits.look()
    assert not said, "it may come back"
    clock.advance(SECONDS)
    inherits.look()
    assert len(said) == 1 and "which an ended node has left" in said[0]
    assert keys and keys <= set(stays.engine.told.prefixes.all())
    events = stays.ask(rest_of(asked, answer, 7))
    assert collect([replace(e, handle=0) for e in events])[0] == answer[40:]
    assert sum(event.cached_tokens for event in events) == 72 and stays.stats().hit_tokens == 72
    clock.advance(SECONDS)
    inherits.look()
    assert len(said) == 1, "there is no more"


@pytest.mark.slow
def test_the_node_that_comes_back_in_time_has_its_own_again(nodes, expected):
    first = nodes()
    asked, answer = requests(prompts())[1], expected("qwen3")[1]
    first.ask(asked)
    folder = first.disk.store.folder
    first.close()
    first.disk = None
    again = nodes()
    assert again.disk.store.folder == folder
    events = again.ask(rest_of(asked, answer, 7))
    assert sum(event.cached_tokens for event in events) > 0
