"""Requests that outlive their gateway, on seeded schedules: gateways are killed, or others claim what they have."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from afserve.clock import FakeClock
from afserve.control.node.kept import KeptRequests
from afserve.control.questions import Asking
from afserve.control.wire.keeping import Keep, KeptAnswer
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenEvent
from afserve.engine.scheduling.routed_experts import RoutedExperts
from tests.control.moving import BAD, Client, GatewaySide, NodeEnd, World

IN_CI, ALL, STEPS = 4, 5000, 700
MOST_OPEN = 8
MOST_MISSES = 20  # then its node was lost together with its gateway


@pytest.fixture(autouse=True)
def scripted_streams(monkeypatch):
    monkeypatch.setattr("afserve.control.node.gateways.Stream", NodeEnd)


class Returning:
    """A client that has lost its gateway, or left `home`: it asks one gateway after the other."""

    def __init__(self, client: Client, id: str, home: GatewaySide | None = None) -> None:
        self.client, self.id, self.home = client, id, home
        self.misses = 0
        self.task: asyncio.Task[Asking[KeptAnswer]] | None = None
        self.at: GatewaySide | None = None


class KeepingWorld(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.loop = asyncio.new_event_loop()
        self.ids: dict[Client, str] = {}
        self.returning: list[Returning] = []
        self.claimed = self.again = self.given = 0

    def close(self) -> None:
        for one in self.returning:
            if one.task is not None:
                one.task.cancel()
        self.turn()
        self.loop.close()

    def turn(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def client(self) -> None:
        """Most of them are kept. Few enough at a time that nodes have room for them."""
        if sum(not client.ended for gateway in self.gateways for client in gateway.clients) > MOST_OPEN:
            return
        before = {client for gateway in self.gateways for client in gateway.clients}
        super().client()
        for gateway in self.gateways:
            for client in gateway.clients:
                if client not in before and sum(client.asked.prompt_ids) != BAD and self.dice.random() < 0.8:
                    self.keep(gateway, client)

    def keep(self, gateway: GatewaySide, client: Client) -> None:
        gateway.leave(client)
        self.given += 1
        self.ids[client] = id = f"id-{self.given}"
        keep = Keep(id, 0, 1, 30.0, b"about")
        client.asked = replace(client.asked, params=replace(client.asked.params, logprobs=0))
        client.left, client.request = False, gateway.homes.open(client.asked, keep)
        gateway.clients.append(client)

    def replace_gateway(self, gateway: GatewaySide) -> None:
        super().replace_gateway(gateway)
        for client in gateway.clients:
            if client in self.ids and not client.ended:
                self.returning.append(Returning(client, self.ids[client]))

    def step(self) -> None:
        super().step()
        if self.dice.random() < 0.02:
            self.wander()
        self.ask()

    def wander(self) -> None:
        """A client connects to another gateway although its own still has the request."""
        gateway = self.dice.choice(self.gateways)
        mine = [client for client in gateway.clients if client in self.ids and not client.ended]
        if mine and self.nobody_waits():
            client = self.dice.choice(mine)
            gateway.clients.remove(client)
            self.returning.append(Returning(client, self.ids[client], gateway))

    def nobody_waits(self) -> bool:
        """One that no node has cannot be asked for elsewhere: its gateway goes on with it alone."""
        return all(not gateway.homes.requests.waiting for gateway in self.gateways)

    def ask(self) -> None:
        for one in list(self.returning):
            if one.task is None and self.dice.random() < 0.1:
                one.at = self.dice.choice([g for g in self.gateways if g is not one.home])
                one.task = self.loop.create_task(one.at.homes.find(one.id, take=True))
            if one.task is not None:
                self.turn()
                if one.at not in self.gateways:
                    one.task.cancel()
                    one.task = None
                elif one.task.done():
                    self.answer(one)

    def answer(self, one: Returning) -> None:
        assert one.task is not None and one.at is not None
        asking, gateway, one.task = one.task.result(), one.at, None
        one.misses += 1
        if asking.found:
            home, kept = asking.found[-1]
            request = gateway.homes.adopt(home, kept, one.client.asked)
            self.claimed += 1
        elif one.misses > MOST_MISSES and not gateway.homes.attendance.unattended():
            if one.home is not None:
                one.home.homes.close(one.client.request)  # it expires there
            request = gateway.homes.open(one.client.asked)  # its node was lost too: it is sent again
            del self.ids[one.client]
            self.again += 1
        else:
            return
        self.returning.remove(one)
        one.client.request, one.client.events, one.client.ended = request, [], 0
        gateway.clients.append(one.client)

    def quiet(self) -> bool:
        self.ask()
        self.expire()
        return not self.returning and super().quiet()

    def expire(self) -> None:
        """What clients have left behind at a gateway that was not told of it."""
        for gateway in self.gateways:
            requests, read = gateway.homes.requests, {client.request for client in gateway.clients}
            for request in (*requests.resting, *requests._placed.values(), *requests.waiting):
                if request not in read:
                    gateway.homes.close(request)


def play(seed: int) -> tuple[int, int]:
    with closing(KeepingWorld(seed)) as world:
        for _ in range(STEPS):
            world.step()
        world.settle()
        world.check()
        return world.claimed, world.again


@pytest.mark.parametrize("block", range(2))
@pytest.mark.slow
def test_every_kept_request_is_answered_once_wherever_its_client_asks(block):
    each = IN_CI // 2
    found = [play(seed) for seed in range(block * each, (block + 1) * each)]
    claimed, again = (sum(counts) for counts in zip(*found, strict=True))
    assert claimed > each // 2 and again, "the schedules test what they are for"


@pytest.mark.long
def test_thousands_of_schedules_of_kept_requests():
    for seed in range(IN_CI, ALL):
        play(seed)


# ---- one node


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(10.0)


@pytest.fixture
def kept(clock) -> KeptRequests:
    kept = KeptRequests(5.0, clock)
    request = GenerationRequest(7, (1, 2), SamplingParams(max_tokens=9))
    kept.open(request, 0, Keep("id", 0, 1, 20.0, b"x"))
    kept.open(GenerationRequest(8, (1, 2), SamplingParams(max_tokens=9)), 0)
    kept.add(TokenEvent(7, (4, 5), cached_tokens=1))
    return kept


def test_a_kept_request_waits_as_long_as_it_says_and_others_for_the_grace(kept, clock):
    kept.left(0)
    clock.advance(5.0)
    assert kept.orphans() == [8]
    kept.close(8)
    assert kept.orphans() == []
    clock.advance(15.0)
    assert kept.orphans() == [7]


def test_a_taken_request_is_told_from_its_beginning(kept, clock):
    kept.left(0)
    (answer,) = kept.find("id")
    assert (answer.request, answer.count, answer.bare, answer.ended) == (7, 2, 0, False)
    assert kept.find("other") == []
    assert kept.take([7], 3) == {0: [7]} and kept.take([7], 3) == {}
    assert not kept.add(TokenEvent(7, (6,))), "its new gateway has not said from where on"
    assert kept.resume(7, 0) == TokenEvent(7, (4, 5, 6), cached_tokens=1)
    clock.advance(100.0)
    assert kept.orphans() == [8] and kept.is_of(7, 3) and kept.gateway_of(7) == 3


def test_experts_are_told_again_from_the_token_that_is_missed(kept):
    """A prompt of 2 tokens: the first event has 2 rows, every further token one."""
    request = GenerationRequest(9, (1, 2), SamplingParams(max_tokens=9, return_routed_experts=True))
    kept.open(request, 0)
    rows = [RoutedExperts(1, 1, 1, bytes((2 * n, 2 * n + 1))) for n in range(3)]
    for n, tokens in enumerate(((4,), (5, 6), (7, 8))):
        kept.add(TokenEvent(9, tokens, routed=rows[n]))
    assert [kept.resume(9, start).routed.data for start in (0, 1, 2, 4)] == [
        bytes(range(6)),
        bytes(range(2, 6)),
        bytes(range(3, 6)),
        bytes([5]),
    ]
    kept.open(GenerationRequest(10, (1, 2), request.params, generated=(3, 4)), 0)
    kept.add(TokenEvent(10, (5, 6), routed=rows[0]))
    assert [kept.resume(10, start).routed.data for start in (2, 3)] == [b"\0\1", b"\1"]


def test_what_came_without_a_gateway_is_told_apart(kept):
    assert kept.find("id")[0].unheard == 0
    kept.left(0)
    kept.add(TokenEvent(7, (6,)))
    kept.take([7], 3)
    kept.add(TokenEvent(7, (7, 8)))
    (answer,) = kept.find("id")
    assert (answer.count, answer.unheard) == (5, 3)
    kept.resume(7, 0)
    assert kept.find("id")[0].unheard == 0


def test_a_halted_request_gets_no_more_tokens_and_is_nothing_to_wait_for(kept):
    kept.halt(7)
    assert not kept.add(TokenEvent(7, (), "cancelled"))
    assert kept.find("id")[0].ended
    kept.close(8)
    assert kept.wanted
    kept.left(0)
    assert not kept.wanted
