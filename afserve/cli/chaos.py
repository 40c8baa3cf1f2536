"""`afserve chaos`: kills, stops and slows nodes of a running server, one after another, and says what became of each.

Which node, how and for how long is drawn from a seed. The server does it, and only to processes that it has started.
"""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from afserve.cli.connection import key_of, model_option
from afserve.cli.options import Within, group_options, option
from afserve.cli.status import clock_time
from afserve.control.wire.change_values import FaultKind
from afserve.doors.client import DEFAULT_URL, Client
from afserve.errors import CapacityError, ConfigError, DeadlineError, NotFoundError, PeerError, RequestError
from afserve.member import Role

Fields = Mapping[str, Any]  # parsed JSON
_LOOK_SECONDS = 0.2
_BACK_SECONDS = 120.0  # from the last fault until all nodes serve again
_ANSWER_SECONDS = 10.0  # for each question: a busy server must not keep this from ending in time
_LEAST_SECONDS = 0.2


class Lasting(Within):
    """Seconds, such as `5`, `5s` or `500ms`."""

    def read_number(self, value: object) -> int | float | None:
        if not isinstance(value, str):
            return super().read_number(value)
        milli = value.endswith("ms")
        number = super().read_number(value.removesuffix("ms").removesuffix("s"))
        return number / 1e3 if milli and number is not None else number


class OneOf(click.ParamType[tuple[str, ...]]):
    """A list with commas of words that are known."""

    name = "list"

    def __init__(self, *known: str) -> None:
        self._known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip() for word in str(value).split(","))
        for word in words:
            if word not in self._known:
                name = param.opts[-1] if param is not None else "list"
                raise ConfigError(f"{name}: {word[:40]!r} is not one of {', '.join(self._known)}")
        return words


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Seconds; `lasting` is the longest that a node is stopped or slow."""

    every: float
    lasting: float
    roles: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChaosFlags:
    """Which faults, how often and how long; and which server."""

    every: float = option(
        default="5s", show_default=True, type=Lasting(0.1, 86_400), help="Between two faults."
    )
    total: float | None = option(
        "--for", type=Lasting(0, 864_000), help="Stop after so long; Ctrl-C if not given."
    )
    roles: tuple[str, ...] = option(
        default="expert,attention", show_default=True, type=OneOf(*map(str, Role)), help="Whose nodes."
    )
    kinds: tuple[str, ...] = option(
        default=",".join(FaultKind),
        show_default=True,
        type=OneOf(*map(str, FaultKind)),
        help="What is done to them.",
    )
    longest: float = option(
        default="5s", show_default=True, type=Lasting(_LEAST_SECONDS, 3600), help="Of a stop."
    )
    seed: int = option(type=int, default=0, show_default=True, help="The same seed draws the same faults.")
    admin_key_file: str | None = option(
        type=click.Path(dir_okay=False), help="File whose first line is the admin key."
    )
    url: str = option(default=DEFAULT_URL, show_default=True, help="Where the server is.")


@click.command()
@group_options(ChaosFlags)
@model_option
def chaos(flags: ChaosFlags, model: str | None) -> None:
    """Break nodes of a running server on purpose: `afserve chaos --every 5s --for 60s --admin-key-file admin.key`.

    Every few seconds one node is killed, stopped or made slow, and what the server says of it is printed. Clients
    should notice nothing but a pause.
    """
    key = key_of(flags.admin_key_file)
    with Client(flags.url, api_key=key, timeout=_ANSWER_SECONDS, retries=0, model=model) as client:
        ChaosRun(
            client, FaultPlan(flags.every, flags.longest, flags.roles, flags.kinds), random.Random(flags.seed)
        ).run(flags.total)


class ChaosRun:
    """`run` returns when all nodes serve again after the last fault."""

    def __init__(self, client: Client, plan: FaultPlan, dice: random.Random) -> None:
        self._client, self._plan, self._dice = client, plan, dice
        self._told: dict[tuple[float, str], float] = {}  # incident -> the wait that was told with it
        self._faults = 0

    def run(self, total: float | None) -> None:
        before = self._client.status()
        self._told = {_name(each): each["stall"] for each in _incidents(before)}
        until = None if total is None else time.monotonic() + total
        try:
            while until is None or time.monotonic() < until:
                began = time.monotonic()
                self._break_one()
                self._watch(began + self._plan.every)
        except KeyboardInterrupt:
            pass
        click.echo(f"no more faults; waits until all nodes serve, at most {_BACK_SECONDS:.0f} s")
        self._sum_up(before, self._wait_back())

    def _break_one(self) -> None:
        """One draw each, whoever is there: as far as the same nodes serve, the same seed does the same."""
        status = self._status()
        nodes = [] if status is None else list(serving(status, self._plan.roles))
        kind, which = self._dice.choice(self._plan.kinds), self._dice.random()
        lasts = self._dice.uniform(_LEAST_SECONDS, self._plan.lasting) if kind != FaultKind.KILL else 0.0
        if not nodes:
            click.echo(
                f"{clock_time(time.time())} nobody to break: no {' or '.join(self._plan.roles)} node serves"
            )
            return
        node = nodes[int(which * len(nodes))]
        try:
            answer: Any = self._client.fault(node, kind, round(lasts, 2))
        except (PeerError, CapacityError, RequestError, NotFoundError) as error:
            click.echo(f"{clock_time(time.time())} {node} was left alone: {error.message}")
            return
        self._faults += 1
        click.echo(f"{clock_time(time.time())} {'; '.join(answer['notes'])}")

    def _watch(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
            self._tell(self._status())

    def _status(self) -> Fields | None:
        """None where a gateway has just gone."""
        try:
            return self._client.status()
        except (PeerError, CapacityError):
            return None

    def _tell(self, status: Fields | None) -> None:
        """What is new. How long work waited because of a loss is often known a moment later than the loss."""
        for each in [] if status is None else _incidents(status):
            told = self._told.get(_name(each))
            if told is None:
                click.echo(f"  {clock_time(each['at'])} {each['text']}")
            elif each["stall"] > told:
                click.echo(
                    f"  {each['node']}: work waited {each['stall'] * 1e3:,.0f} ms because of this loss"
                )
            self._told[_name(each)] = each["stall"]

    def _wait_back(self) -> Fields:
        """What the server says once all nodes serve again."""
        until, missing = time.monotonic() + _BACK_SECONDS, "its gateway"
        while True:
            status = self._status()
            self._tell(status)
            if status is not None and not (missing := _missing(status)):
                return status
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{missing} not back {_BACK_SECONDS:g} s after the last fault; see `afserve status`"
                )
            time.sleep(_LOOK_SECONDS)

    def _sum_up(self, before: Fields, after: Fields) -> None:
        lost = _lost(after) - _lost(before)
        moved = sum(after["moved"].values()) - sum(before["moved"].values())
        resent = after["resent_rows"] - before["resent_rows"]
        loaded = (after["reloaded_bytes"] - before["reloaded_bytes"]) / 1e6
        click.echo(
            f"{self._faults:,} faults: {lost:,} nodes lost, {moved:,} requests moved, {resent:,} rows sent again, "
            f"{loaded:,.1f} MB of experts reloaded; all nodes serve"
        )


def serving(status: Fields, roles: tuple[str, ...]) -> Iterator[str]:
    """Names of nodes that serve, in their order."""
    return (n["name"] for n in status["nodes"] if n["role"] in roles and n["state"] == "ready")


def _missing(status: Fields) -> str:
    """Roles of which fewer nodes serve than should."""
    here = {role: len(list(serving(status, (role,)))) for role in status["wanted"]}
    return ", ".join(f"{n - here[r]} {r} nodes" for r, n in status["wanted"].items() if here[r] < n)


def _incidents(status: Fields) -> list[Fields]:
    found: list[Fields] = status["incidents"]
    return found


def _name(incident: Fields) -> tuple[float, str]:
    return incident["at"], incident["node"]


def _lost(status: Fields) -> int:
    return sum(sum(causes.values()) for causes in status["lost"].values())
