"""Requests between gateways and attention nodes while streams break and nodes are lost: seeded schedules."""

import pytest

from tests.control.moving import NodeEnd, World

IN_CI, ALL, STEPS = 15, 10_000, 1000


@pytest.fixture(autouse=True)
def scripted_streams(monkeypatch):
    monkeypatch.setattr("afserve.control.node.gateways.Stream", NodeEnd)


def play(seed: int) -> World:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.settle()
    world.check()
    return world


@pytest.mark.parametrize("block", range(3))
@pytest.mark.slow
def test_every_request_is_answered_once_with_every_token_once(block):
    each = IN_CI // 3
    worlds = [play(seed) for seed in range(block * each, (block + 1) * each)]
    clients = [client for world in worlds for gateway in world.gateways for client in gateway.clients]
    moved = sum(sum(g.homes.moves.counts.values()) for world in worlds for g in world.gateways)
    assert len(clients) > 10 * each and moved > 5 * each, "the schedules test what they are for"
    assert sum(client.error is None for client in clients) > 0.6 * len(clients)


@pytest.mark.long
def test_ten_thousand_schedules():
    for seed in range(IN_CI, ALL):
        play(seed)
