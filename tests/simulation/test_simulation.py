"""The whole protocol under seeded schedules of losses, stops, returns, scaling, migrations and cancels.

Every request ends exactly once, greedy tokens are those of the undisturbed colocated run, nothing waits without a
deadline, and no KV block is left.
"""

import pytest

from afserve.control.membership.events import Happening
from afserve.member import Role
from tests.simulation.world import World

BY_DAY, BLOCKS, ALL, ROUNDS = 16, 2, 10_000, 150
KEPT = (
    706,  # a row without an answer spoiled rows before it in the same chunk, and the error named a damaged checkpoint
    794,  # a process ended between joining and being admitted
    1353,  # an expert node that had gone on to another epoch refused a row, which ended the attention node
)


def play(seed: int, model, *, roles: bool = False) -> World:
    """Roles change in schedules of their own: the dice of the others fall as they always have."""
    world = World(seed, model, roles=roles)
    world.run(ROUNDS)
    world.check()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("seed", [12, 8])
def test_nobody_notices_one_loss(seed, model):
    world = World(seed, model)
    world.run(40)
    world.check()
    assert world.happened[Happening.LOST] == world.happened[Happening.RETURNED] == 1
    assert world.done and not any(client.failure for client in world.done)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_nobody_notices(block, model):
    each = BY_DAY // BLOCKS
    worlds = [play(seed, model, roles=block % 2 == 1) for seed in range(block * each, (block + 1) * each)]
    done = [client for world in worlds for client in world.done]
    assert len(done) > 8 * each and sum(not client.failure for client in done) > 0.9 * len(done)
    assert sum(world.happened[Happening.LOST] for world in worlds) > each
    assert any(world.happened["role changed"] for world in worlds) == (block % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_nobody_notices_drafts(block, drafting_model):
    """What happens meets runs of several tokens, and drafts that are verified."""
    worlds = [play(seed, drafting_model, roles=block == 1) for seed in range(block * 12, block * 12 + 6)]
    nodes = [process.engine for world in worlds for process in world.roles(Role.ATTENTION) if process.loop]
    drafts = [node.stats().drafts for node in nodes]
    assert 0 < sum(one.accepted for one in drafts) < sum(one.tokens for one in drafts)
    assert sum(not client.failure for world in worlds for client in world.done) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", KEPT)
def test_what_went_wrong_once(seed, model):
    play(seed, model)


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_ten_thousand_schedules(model):
    for seed in range(BY_DAY, ALL):
        play(seed, model, roles=seed % 2 == 1)
