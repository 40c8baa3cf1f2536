"""What a run needs of whoever starts its nodes: this machine's fork server, or a cluster's own engine.

The membership decides when a node is started, and started again; a launcher only obeys.
"""

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from afserve.member import NodeId

OnExit = Callable[[NodeId | str, str], None]  # a node, or the helper that all depend on; why


class Launcher(Protocol):
    """Nodes have one process at a time: what is left of an earlier one is killed by the next `spawn`."""

    @property
    def token(self) -> str:
        """The run's."""
        ...

    @property
    def token_file(self) -> Path:
        """It is in there too, for nodes that others start; readable by this user only."""
        ...

    def spawn(
        self,
        node: NodeId,
        join: str,
        gateway: dict[str, Any] | None = None,
        listening: socket.socket | None = None,
        certs: Path | None = None,
    ) -> None:
        """Start it; it joins the controller at `join`. A gateway's options go along, and the socket it accepts on.

        `certs` is the folder of certificates on its host.
        """
        ...

    def running(self, node: NodeId) -> int | None:
        """The pid of its process on its host, or None where it has none that was started from here."""
        ...

    def inherit(self, node: NodeId, pid: int) -> None:
        """This node says that it has been there since an earlier controller of the run."""
        ...

    def send_signal(self, node: NodeId, pid: int, number: signal.Signals) -> None:
        """To this process of a node; nothing where it has ended."""
        ...

    async def watch(self, on_exit: OnExit) -> None:
        """Report each node's end, with the reason, until all is stopped."""
        ...

    def last_words(self, name: str) -> str:
        """The last lines that a node wrote."""
        ...

    def stop(self) -> None:
        """End everything that is left. May be called again."""
        ...
