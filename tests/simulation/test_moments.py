"""A loss at the worst moment, over the simulated deployment: beside another one, and while something else is under way.

Each case begins something, waits for the moment and kills. As in every schedule, each request ends exactly once, tokens
are those of the undisturbed run, and all is in order again within the bound.
"""

import pytest

from afserve.control.membership.events import ChangeRole, DrainNode, Happening, Scale
from afserve.control.membership.members import State
from afserve.control.membership.migration import Phase
from afserve.errors import ConfigError
from afserve.member import Role, expert_node
from tests.simulation.world import BOUND, World

SEEDS, CALM, ROUNDS = range(6), 25, 120


def kill(world, role=None):
    """Some process of a role, if there is one."""
    found = [p for p in world.processes if p.alive and (role is None or p.node.role is role)]
    if found:
        world.exited(world.dice.choice(found))


def kill_two(world):
    kill(world)
    kill(world)


def kill_all_copies(world):
    """Whoever holds expert 0 of the first layer."""
    holders = {expert_node(node) for node, _, _ in world.membership.migration.placement.layers[0].replicas(0)}
    for process in [p for p in world.processes if p.node in holders and p.alive]:
        world.exited(process)


def drain(world):
    world.on(DrainNode(world.dice.choice(world.membership.state.staying())))


def change_role(world):
    for node in world.membership.state.staying():
        other = Role.EXPERT if node.role is Role.ATTENTION else Role.ATTENTION
        try:
            world.membership.wishes.check_role(node, other)
        except ConfigError:
            continue
        world.on(ChangeRole(node, other))
        return


def grow(world):
    for role in (Role.ATTENTION, Role.EXPERT):
        world.on(Scale(role, world.membership.deployment.count(role) + 1))


def nothing(world):
    """The loss itself is what begins."""


CASES = {  # what begins, the moment, the loss
    "two at once": (nothing, lambda world: True, kill_two),
    "every copy of an expert": (nothing, lambda world: True, kill_all_copies),
    "during recovery": (
        lambda world: kill(world, Role.EXPERT),
        lambda world: bool(world.membership.members.vacancies()),
        kill,
    ),
    "while experts are loaded": (
        lambda world: kill(world, Role.EXPERT),
        lambda world: world.membership.migration.phase is Phase.FILLING,
        lambda world: kill(world, Role.EXPERT),
    ),
    "while some have adopted": (
        World.place,
        lambda world: world.membership.migration.phase is Phase.ADOPTING,
        kill,
    ),
    "during scaling": (
        grow,
        lambda world: any(member.state is State.LOADING for member in world.membership.members),
        kill,
    ),
    "during a drain": (drain, lambda world: bool(world.membership.state.leaving), kill),
    "during a role change": (change_role, lambda world: bool(world.membership.state.leaving), kill),
}


def play(world, begin, moment, loss):
    """Whether the moment came."""
    world.until(lambda: world.membership.settled, BOUND, "the run never settled")
    struck = False
    for number in range(ROUNDS):
        world.round()
        if world.dice.random() < 0.24:
            world.client()
        if number == CALM:
            begin(world)
        if number >= CALM and not struck and moment(world):
            loss(world)
            struck = True
    world.until(world.quiet, BOUND, "something is left open")
    world.check()
    return struck


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nobody_notices_a_loss(case, model):
    worlds = [World(seed, model, roles=True) for seed in SEEDS]
    struck = [play(world, *CASES[case]) for world in worlds]
    assert sum(struck) >= 2, "the moment has come"
    assert sum(world.happened[Happening.LOST] for world in worlds) > 0
    done = [client for world in worlds for client in world.done]
    # How many come is drawn, 8 to 14 a world.
    assert len(done) > 6 * len(worlds) and sum(not client.failure for client in done) > 0.8 * len(done)
