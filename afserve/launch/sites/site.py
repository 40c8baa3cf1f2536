"""Where a run's nodes are, and who starts them: the contract of every kind of host provider. `choose.py` picks one.

`local.py` (this machine), `hosts.py` (a cluster file's hosts, by ssh or by hand), `ray.py`, and `awaited.py`
(Kubernetes, Slurm, people: whatever starts nodes by itself) follow it. The membership decides when a node is started,
and started again; a site only obeys.
"""

import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from afserve.member import NodeId

if TYPE_CHECKING:  # both are heavy, and a site starts before they are needed
    from afserve.comm.binding import Binding
    from afserve.control.controller import Controller
    from afserve.control.hosts import CarriedHosts
    from afserve.launch.plan.hosts import HostAssignment
    from afserve.launch.plan.wishes import UpFlags
    from afserve.launch.processes.keeper import NodeKeeper
    from afserve.launch.sites.survey import Survey

OnExit = Callable[[NodeId | str, str], None]  # a node, or the helper that all depend on; why


class Site(ABC):
    """`start()` begins, `with` ends. Nodes have one process at a time: what is left of an earlier one is killed by the
    next `spawn`."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    @abstractmethod
    def token(self) -> str:
        """The run's."""

    @property
    @abstractmethod
    def token_file(self) -> Path:
        """It is in there too, for nodes that others start; readable by this user only."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The run's own folder, readable by this user only; gone when the run is."""

    @abstractmethod
    def start(self) -> None:
        """What starts nodes on this machine."""

    @abstractmethod
    def survey(self, flags: "UpFlags") -> "Survey":
        """What there is to plan a run for. May wait for room. Raises ConfigError for flags that fit no such site."""

    @abstractmethod
    def lend(self) -> "NodeKeeper":
        """Processes that are forked from this one may start nodes from now on; this one turns their keeper."""

    @abstractmethod
    def spawn(
        self,
        node: NodeId,
        join: str,
        gateway: dict[str, Any] | None = None,
        listening: socket.socket | None = None,
        certs: Path | None = None,
        binding: "Binding | None" = None,
    ) -> None:
        """Start it; it joins the controller at `join`. A gateway's options go along, and the socket it accepts on.

        `certs` is the folder of certificates on its host, `binding` what it is bound to on this one.
        """

    @abstractmethod
    def pid_of(self, node: NodeId) -> int | None:
        """The pid of its process on its host, or None where it has none that was started from here."""

    @abstractmethod
    def inherit(self, node: NodeId, pid: int) -> None:
        """This node says that it has been there since an earlier controller of the run."""

    @abstractmethod
    def send_signal(self, node: NodeId, pid: int, number: signal.Signals) -> None:
        """To this process of a node; nothing where it has ended."""

    @abstractmethod
    async def watch_nodes(self, on_exit: OnExit) -> None:
        """Report each node's end, with the reason, until all is stopped."""

    @abstractmethod
    def last_words(self, name: str) -> str:
        """The last lines that a node wrote, for the one who started it; clients never see them."""

    @abstractmethod
    def stop(self) -> None:
        """End everything that is left; asks first, then makes sure. May be called again."""

    @abstractmethod
    def kill(self) -> None:
        """End what is left on this machine at once."""

    async def invite(  # noqa: B027  most sites invite nobody
        self,
        assignment: "HostAssignment",
        controller: "Controller",
        hosts: "CarriedHosts",
        say: Callable[[str], None],
    ) -> None:
        """Once the controller listens: have the hosts join that nobody here reaches otherwise; `say` prints a line."""

    async def dismiss(self) -> None:  # noqa: B027
        """After the run: end what `invite` began."""

    async def bring(self, controller: "Controller") -> None:  # noqa: B027
        """From when the controller listens until it is cancelled: whoever starts nodes by itself is told how many are
        wanted."""
