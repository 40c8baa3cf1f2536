"""The process that talks to Ray for a run: the only file that imports it. It ends with its parent.

Orders and reports are JSON lines on one inherited socket, as the fork server's are. Placement groups set resources
aside, one group per role; an actor in each bundle starts `afserve node`. What becomes of a lost node is up to the
membership: it orders the node again, and this process finds it an actor.
"""

import asyncio
import json
import signal
import socket
import sys
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from afserve import __version__
from afserve.kinship import die_with_parent, name_process
from afserve.launch.plan.ray_settings import AUTO, Bundle, in_words
from afserve.launch.sites.ray_actor import NodeHost

_LINE = 1 << 24
_SLICE = 5.0  # seconds between two words about what is waited for
_NEWS = 10.0
_END = 3.0
_DEAD = -1  # the exit code of a process whose host or actor has gone
_NOT_INSTALLED = (
    "a host of Ray's has no afserve; install the version of this one in the Python that Ray runs there"
)
_HOST = ray.remote(NodeHost)
Seat = tuple[PlacementGroup, int]  # a bundle of a group


class Refusal(Exception):
    """What the user can mend; the parent raises it again as its own."""


class RayHelper:
    """`serve()` returns when the parent has gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._groups: list[PlacementGroup] = []
        self._seats: dict[str, Seat] = {}
        self._bundles: dict[str, Bundle] = {}  # by role: what one more node takes
        self._seconds = 0.0
        self._actors: dict[str, Any] = {}  # by node name: Ray's handles
        self._orders: dict[str, asyncio.Task[None]] = {}  # by node name: the latest
        self._hosts: dict[str, str] = {}
        self._others: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        try:
            while line := await self._reader.readline():
                order = json.loads(line)
                if "ask" in order:
                    await self._answer(order)
                elif "start" in order:
                    self._begin(order)
                else:
                    self._spawn(self._pass_on(order))
        finally:
            await self._end()

    # ---- before the run: questions, one after another

    async def _answer(self, order: Mapping[str, Any]) -> None:
        try:
            connects = order["ask"] == "connect"
            found = (
                await asyncio.to_thread(_connect, order["address"])
                if connects
                else await self._reserve(order)
            )
            self._say({"answer": found})
        except Refusal as refused:
            self._say({"refused": str(refused)})
        except RayError as error:
            lacks = "No module named 'afserve'" in str(error)
            self._say({"refused": _NOT_INSTALLED if lacks else f"Ray failed: {error}"})

    async def _reserve(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A group per role, an actor per bundle, and what each actor's host looks like."""
        self._seconds = order["seconds"]
        wanted = {role: [pool["bundle"]] * pool["nodes"] for role, pool in order["pools"].items()}
        self._bundles = {role: pool["bundle"] for role, pool in order["pools"].items()}
        groups = {
            role: placement_group(bundles, strategy=order["strategy"])
            for role, bundles in wanted.items()
            if bundles
        }
        self._groups += groups.values()
        await self._wait_for(groups, wanted, order["strategy"])
        names = []
        for role, group in groups.items():
            for index in range(len(wanted[role])):
                names.append(f"{role}-{index}")
                self._seats[names[-1]] = group, index
                self._actors[names[-1]] = _actor((group, index), self._bundles[role])
        looks = [self._actors[name].look.remote(order["model"], order["gpus"]) for name in names]
        found = [json.loads(text) for text in await asyncio.gather(*looks)]
        hosts = [_place(self._seats[name]) for name in names]
        self._hosts |= {name: look["name"] for name, look in zip(names, found, strict=True)}
        _check_hosts(order["model"], found)
        return [
            {"node": name, "host": host, "address": address, **look}
            for name, (host, address), look in zip(names, hosts, found, strict=True)
        ]

    async def _wait_for(
        self, groups: Mapping[str, PlacementGroup], wanted: Mapping[str, Sequence[Bundle]], strategy: str
    ) -> None:
        """Says every few seconds what is waited for. Raises Refusal with what was asked and what there is."""
        until = asyncio.get_running_loop().time() + self._seconds
        while True:
            left = until - asyncio.get_running_loop().time()
            seconds = max(0.0, min(_SLICE, left))
            ready = {role: await asyncio.to_thread(group.wait, seconds) for role, group in groups.items()}
            if all(ready.values()):
                return
            words = _shortage(
                {role: wanted[role] for role, is_ready in ready.items() if not is_ready}, strategy
            )
            if asyncio.get_running_loop().time() >= until:
                raise Refusal(
                    f"Ray found no room within {self._seconds:g} s for {words}. Start more of Ray's nodes, ask for "
                    "less with --ray-attention, --ray-experts or fewer nodes, or wait longer with --ray-wait"
                )
            self._say({"waiting": f"waiting for room on Ray for {words}"})

    # ---- nodes

    def _begin(self, order: Mapping[str, Any]) -> None:
        """The latest order for a node is the one that counts."""
        name = order["start"]
        if (earlier := self._orders.pop(name, None)) is not None:
            earlier.cancel()
        self._orders[name] = asyncio.create_task(self._live(name, order))

    async def _live(self, name: str, order: Mapping[str, Any]) -> None:
        """One process of a node, from its start to its end."""
        pid = 0
        try:
            actor = await self._hosting(name, order["role"])
            which = order["role"], order["index"], order["join"], order["token"]
            pid = await actor.start.remote(*which, order["certs"], order["insecure"])
            node = {"started": name, "role": order["role"], "index": order["index"]}
            self._say({**node, "pid": pid, "host": self._hosts[name]})
            code = await self._follow(name, actor, pid)
            self._say({"exited": name, "pid": pid, "code": code})
        except (RayError, Refusal) as error:
            self._drop(name)
            said = str(error).strip().splitlines()
            why = said[0] if said else type(error).__name__
            self._say({"exited": name, "pid": pid, "code": _DEAD, "why": f"its place on Ray was lost: {why}"})

    async def _hosting(self, name: str, role: str) -> Any:
        """The actor of this node: the one it has, or a new one where Ray finds room."""
        if name not in self._seats:
            await self._seat(name, role)
        if (actor := self._actors.get(name)) is not None and await _answers(actor):
            return actor
        self._drop(name)
        actor = self._actors[name] = _actor(self._seats[name], self._bundles[role])
        looking = asyncio.ensure_future(actor.look.remote("", False))
        while not (await asyncio.wait({looking}, timeout=_NEWS))[0]:
            self._say(
                {"waiting": f"{name} waits for room on Ray: {_shortage({role: [self._bundles[role]]}, '')}"}
            )
        self._hosts[name] = json.loads(looking.result())["name"]
        return actor

    async def _seat(self, name: str, role: str) -> None:
        """One more node than at first: a group of its own. Raises Refusal."""
        group = placement_group([self._bundles[role]], strategy="PACK")
        try:
            await self._wait_for({role: group}, {role: [self._bundles[role]]}, "PACK")
        except (Refusal, asyncio.CancelledError):
            remove_placement_group(group)
            raise
        self._groups.append(group)
        self._seats[name] = group, 0

    async def _follow(self, name: str, actor: Any, pid: int) -> int:
        """Passes on what the process writes; its exit code. Raises RayError when actor or host are lost."""
        while True:
            news = json.loads(await actor.heard.remote(pid, _NEWS))
            if news["lines"]:
                self._say({"lines": news["lines"], "node": name, "host": self._hosts[name]})
            if news["code"] is not None:
                return int(news["code"])

    async def _pass_on(self, order: Mapping[str, Any]) -> None:
        if (actor := self._actors.get(order["name"])) is not None:
            await asyncio.gather(
                actor.send_signal.remote(order["pid"], order["signal"]), return_exceptions=True
            )

    def _drop(self, name: str) -> None:
        if (actor := self._actors.pop(name, None)) is not None:
            ray.kill(actor)

    # ---- the end

    async def _end(self) -> None:
        """Nodes are asked, then made to go; what was set aside is given back."""
        for task in [*self._orders.values(), *self._others]:
            task.cancel()
        ends = [asyncio.ensure_future(actor.kill.remote()) for actor in self._actors.values()]
        if ends:
            await asyncio.wait(ends, timeout=_END)
        for name in list(self._actors):
            self._drop(name)
        for group in self._groups:
            remove_placement_group(group)
        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)

    def _say(self, what: Mapping[str, object]) -> None:
        self._writer.write(json.dumps(what).encode() + b"\n")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


def _connect(address: str) -> dict[str, Any]:
    """The address of this machine as Ray knows it, and those of Ray's hosts. Raises Refusal."""
    try:
        _reach(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        where = "on this machine" if address == AUTO else f"at {address}"
        raise Refusal(
            f"--ray: no Ray cluster answers {where} ({said[0] if said else type(error).__name__}); start one with "
            "`ray start --head`, or give the address of one"
        ) from error
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {"own": get_node_ip_address(), "hosts": [node["NodeManagerAddress"] for node in alive]}


def _reach(address: str) -> None:
    """Raises OSError or ValueError where nobody listens; Ray itself tries for minutes."""
    if address != AUTO:
        where = urlsplit(address if "://" in address else f"ray://{address}")
        if not where.hostname or not where.port:
            raise ValueError("an address is HOST:PORT or ray://HOST:PORT")
        socket.create_connection((where.hostname, where.port), timeout=_SLICE).close()


def _actor(seat: Seat, bundle: Bundle) -> Any:
    """Takes all of the bundle, so that Ray gives it the GPUs in there. It is not started anew by Ray."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    strategy = PlacementGroupSchedulingStrategy(placement_group=seat[0], placement_group_bundle_index=seat[1])
    options = _HOST.options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources=others or None,
        scheduling_strategy=strategy,
        max_restarts=0,
        max_concurrency=8,
    )
    return options.remote()


async def _answers(actor: Any) -> bool:
    """False where its host or its process has gone."""
    try:
        await actor.look.remote("", False)
    except RayError:
        return False
    return True


def _place(seat: Seat) -> tuple[str, str]:
    """(Ray's id of the host that a bundle is on, its address)."""
    table = placement_group_table(seat[0])["bundles_to_node_id"]
    found = table[seat[1]]
    return found, next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == found)


def _check_hosts(model: str, looks: Sequence[Mapping[str, Any]]) -> None:
    """The same afserve everywhere, and a checkpoint. What is in it is compared when the nodes have joined."""
    wrong = {
        f"{look['name']} has afserve {look['version']}" for look in looks if look["version"] != __version__
    }
    if wrong:
        raise Refusal(
            f"this is afserve {__version__}, but {', '.join(sorted(wrong))}; install the same version there"
        )
    lacking = sorted({look["name"] for look in looks if not look["has_model"]})
    if lacking:
        raise Refusal(
            f"--model: there is no {model}/config.json on {', '.join(lacking)}; put the checkpoint at the same path on "
            "every host"
        )


def _shortage(pools: Mapping[str, Sequence[Bundle]], strategy: str) -> str:
    """What is asked, and what there is, of the resources in question."""
    asked: Counter[str] = Counter()
    words = []
    for role, bundles in pools.items():
        words.append(f"{len(bundles)} {role} node{'s' * (len(bundles) > 1)} with {in_words(bundles[0])} each")
        for bundle in bundles:
            asked.update(bundle)
    there, free = ray.cluster_resources(), ray.available_resources()
    lines = [
        f"{name}: asked {amount:g}, there {'is' if there.get(name, 0) <= 1 else 'are'} {there.get(name, 0):g} "
        f"({free.get(name, 0):g} free)"
        for name, amount in sorted(asked.items())
    ]
    hosts = sum(node["Alive"] for node in ray.nodes())
    lying = f", {strategy.lower().replace('_', '-')}" if strategy else ""
    return f"{' and '.join(words)}{lying} ({'; '.join(lines)}; {hosts} host{'s' * (hosts > 1)})"


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=_LINE)
    serving = asyncio.create_task(RayHelper(reader, writer).serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        writer.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    name_process("afserve-ray")
    asyncio.run(main(int(sys.argv[1])))
