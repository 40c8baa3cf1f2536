"""Hosts that carry nodes, over real gRPC: who is let in, what each is told to start, and what is said of the others."""

import asyncio
import logging

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve import __version__
from afserve.control.hosts import CarriedHosts, HostPlace, Served
from afserve.control.wire import channel
from afserve.control.wire.hosts import (
    CARRY_METHOD,
    Attach,
    EndHost,
    HostFailed,
    NodeExited,
    StartNode,
    Welcome,
    decode_from_host,
    decode_to_host,
    encode_host,
)
from afserve.errors import ProtocolError
from afserve.member import NodeId, Role, attention_node, expert_node

TOKEN = "secret"
PLACES = (
    HostPlace("b", frozenset({"10.0.0.2"}), (expert_node(0), expert_node(1)), ("cuda:0", "cuda:1")),
    HostPlace("c", frozenset({"10.0.0.3", "fd00::3"}), (expert_node(2), attention_node(1)), ("cpu", "cpu")),
)
SECONDS = 60.0


def attach(*addresses, called="", version=__version__, running=()):
    return Attach("name", addresses, called, version, running=running)


class Scene:
    """The controller's side, and streams of hosts to it."""

    def __init__(self):
        self.there: set[NodeId] = set()
        self.exits: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self.hosts = CarriedHosts(
            TOKEN,
            PLACES,
            Served("/model", "fingerprint", 5.0, {Role.ATTENTION: 300, Role.EXPERT: 200}),
            self.there.__contains__,
            lambda node, why: self.exits.append((str(node), why)),
            lambda error: self.failures.append(error.message),
        )

    async def __aenter__(self):
        self.server = grpc.aio.server(options=channel.options(receive="from_node"))
        self.server.add_generic_rpc_handlers((self.hosts.handler,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.client = grpc.aio.insecure_channel(self.address)
        return self

    async def __aexit__(self, *what):
        await self.client.close()
        await self.server.stop(None)

    def open(self, token=TOKEN):
        return self.client.stream_stream(CARRY_METHOD)(metadata=((channel.TOKEN_KEY, f"Bearer {token}"),))

    async def join(self, first):
        call = self.open()
        await call.write(encode_host(first))
        return call, await heard(call)

    async def refused(self, first, token=TOKEN):
        call = self.open(token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # writing raises what has come until then
            await call.write(first if isinstance(first, bytes) else encode_host(first))
            await asyncio.wait_for(call.read(), SECONDS)
        return caught.value.details()

    async def until(self, true):
        for _ in range(1000):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came true")


async def heard(call):
    return decode_to_host(await asyncio.wait_for(call.read(), SECONDS))


def play(scenario):
    async def run():
        async with Scene() as scene:
            await scenario(scene)

    asyncio.run(run())


def test_hosts_come_in_any_order_and_are_told_what_was_due():
    async def scenario(scene):
        for node in (expert_node(0), expert_node(1), expert_node(2)):
            scene.hosts.start(node)
        assert set(scene.hosts.missing()) == {"b", "c"}
        third, welcome = await scene.join(attach("10.0.0.3", "10.9.9.9"))
        assert welcome == Welcome(
            "c", ("expert-2", "attention-1"), "/model", "fingerprint", 5.0, ("cpu", "cpu"), (200, 300)
        )
        assert await heard(third) == StartNode("expert", 2)
        second, welcome = await scene.join(attach("10.0.0.2"))
        assert welcome.called == "b"
        assert [await heard(second), await heard(second)] == [StartNode("expert", 0), StartNode("expert", 1)]
        scene.there.update([expert_node(0), expert_node(1), expert_node(2)])
        assert scene.hosts.missing() == {"c": [attention_node(1)]}

    play(scenario)


def test_a_node_is_started_again_on_its_host_when_the_membership_says_so():
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.2"))
        assert scene.hosts.carries(expert_node(1)) and not scene.hosts.carries(expert_node(2))
        await call.write(encode_host(NodeExited("expert", 1, "killed")))
        await scene.until(lambda: scene.exits == [("expert-1", "killed")])
        scene.hosts.start(expert_node(1))
        assert await heard(call) == StartNode("expert", 1)

    play(scenario)


def test_who_comes_back_is_not_told_to_start_what_runs(caplog):
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.2"))
        call.cancel()
        await scene.until(lambda: not scene.hosts.has_come("b"))
        for node in (expert_node(0), expert_node(1)):
            scene.hosts.start(node)
        scene.there.add(expert_node(0))  # somebody started it by hand meanwhile
        call, _ = await scene.join(attach("10.0.0.2", running=("expert-1",)))
        scene.hosts.start(expert_node(0))
        assert await heard(call) == StartNode("expert", 0)  # asked for now

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "host b has gone; its nodes are started again when it is back" in caplog.text


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (attach("10.0.0.2", version="9.9"), f"version is 9.9 there and {__version__} at the controller"),
        (Attach("name", ("10.0.0.2",), "", __version__, 1), "protocol is 1 there and"),
        (attach("10.0.0.9"), "its addresses (10.0.0.9) are those of no host of the cluster file"),
        (attach("10.0.0.2", "10.0.0.3"), "are those of several hosts of the cluster file"),
        (attach("10.0.0.2", called="z"), "--as z: the cluster file's other hosts are b, c"),
        (NodeExited("expert", 0, ""), "a host says first which one it is; got NodeExited"),
        (b"garbage", "7 bytes are no message of a host"),
        (b'{"kind": "Attach"}', "18 bytes are no message of a host"),
    ],
)  # fmt: skip
def test_whoever_does_not_belong_here_is_told_why_and_logged(caplog, first, said):
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.3"))
        assert said in await scene.refused(first)
        scene.hosts.start(expert_node(2))
        assert await heard(call) == StartNode("expert", 2)  # nobody else notices

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "was refused as a host" in caplog.text


def test_a_replayed_join_and_a_wrong_token_are_refused(caplog):
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.2"))
        assert "b is connected already" in await scene.refused(attach("10.0.0.2"))
        assert "--token-file" in await scene.refused(attach("10.0.0.3"), token="guessed")
        assert scene.hosts.has_come("b") and not scene.hosts.has_come("c")
        scene.hosts.start(expert_node(0))
        assert await heard(call) == StartNode("expert", 0)

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert caplog.text.count("was refused") == 2


def test_a_host_speaks_for_its_own_nodes_only():
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.2"))
        await call.write(encode_host(NodeExited("expert", 2, "not mine")))
        with pytest.raises(grpc.aio.AioRpcError, match="does not say NodeExited now"):
            await asyncio.wait_for(call.read(), SECONDS)
        assert not scene.exits

    play(scenario)


def test_a_host_that_is_wrong_before_its_welcome_is_written_is_told_so():
    async def scenario(scene):
        call = scene.open()
        await call.write(encode_host(attach("10.0.0.2")))
        await call.write(encode_host(NodeExited("expert", 2, "not mine")))
        with pytest.raises(grpc.aio.AioRpcError, match="does not say NodeExited now"):
            while True:
                await asyncio.wait_for(call.read(), SECONDS)

    for _ in range(10):
        play(scenario)


def test_what_differs_on_a_host_is_named():
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.2"))
        await call.write(encode_host(HostFailed("model", "another one")))
        await scene.until(lambda: scene.failures == ["host b: model: another one"])

    play(scenario)


def test_the_end_of_the_run_is_told():
    async def scenario(scene):
        call, _ = await scene.join(attach("10.0.0.2"))
        ending = asyncio.create_task(scene.hosts.end("why"))
        assert await heard(call) == EndHost("why")
        await ending
        late, _ = await scene.join(attach("10.0.0.3"))
        assert await heard(late) == EndHost("why")

    play(scenario)


@pytest.mark.parametrize(
    "value",
    [attach("10.0.0.2", running=("expert-0",)), NodeExited("attention", 3, "why"), HostFailed("a", "b"),
     Welcome("b", ("expert-0",), "/m", "f", 5.0, ("cuda:1",), (1 << 40,)), StartNode("expert", 1), EndHost()],
)  # fmt: skip
def test_values_survive_the_wire(value):
    decode = decode_to_host if isinstance(value, Welcome | StartNode | EndHost) else decode_from_host
    assert decode(encode_host(value)) == value


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_survived(data):
    for decode in (decode_from_host, decode_to_host):
        with pytest.raises(ProtocolError):
            decode(data)


@pytest.mark.parametrize(
    "data",
    [b'{"kind": "StartNode", "role": "gateway", "index": 0}', b'{"kind": "StartNode", "role": "expert", "index": -1}',
     b'{"kind": "StartNode", "role": "expert", "index": "0"}', b'{"kind": "StartNode", "role": "expert"}', b"[]", b"1",
     b'{"kind": "EndHost", "why": "", "more": 1}', b'{"kind": "Attach", "why": ""}',
     encode_host(Welcome("b", ("expert-0",), "/m", "f", 5.0, ("cpu",), ())),
     encode_host(Welcome("b", ("expert-0",), "/m", "f", 5.0, ("cpu",), (1,))).replace(b"[1]", b'["1"]')],
)  # fmt: skip
def test_fields_are_checked(data):
    with pytest.raises(ProtocolError):
        decode_to_host(data)
