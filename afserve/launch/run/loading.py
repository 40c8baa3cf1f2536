"""Shows how far the nodes have loaded, and on which hosts: bars on a terminal, one line per node elsewhere."""

import socket

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from afserve.control.membership.roster import Member, State


class LoadingBars:
    """`update` is the controller's progress callback. `with` shows and clears; what comes before is not shown."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._begun = False
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.fields[name]:12}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )

    def __enter__(self) -> "LoadingBars":
        self._begun = True
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, member: Member, model: str = "") -> None:
        """`model` where several load."""
        if not self._begun:
            return
        name = f"{model} {_named(member)}" if model else _named(member)
        if not self._live:
            if member.state is State.READY:
                self._console.print(f"{name} ready", highlight=False)
            return
        self._show(name, member.progress.fraction, member.progress.what)

    def verify(self, done: float, model: str = "") -> None:
        """How much of the controller's own copy has been read; called from another thread."""
        if self._live and self._begun:
            self._show(f"{model} own copy".strip(), done, "all bytes")

    def _show(self, name: str, done: float, what: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", total=1.0, name=name)
        self._bars.update(self._tasks[name], completed=done, description=what)


def _named(member: Member) -> str:
    """With the host, where that is another one."""
    return str(member.node) if member.host == socket.gethostname() else f"{member.node} on {member.host}"
