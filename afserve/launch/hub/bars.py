"""Shows how far each file of a download is: bars on a terminal, one line per file elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from afserve.launch.hub import download
from afserve.launch.hub.listing import HubFile


@contextmanager
def bars(console: Console) -> Iterator[download.Progress]:
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:

        def heard(file: HubFile, done: int) -> None:
            if file.name not in tasks:
                tasks[file.name] = shown.add_task(file.name, total=file.size)
            shown.update(tasks[file.name], completed=done)
            if done == file.size and shown.disable:
                console.print(f"{file.name} is here ({file.size:,} bytes)", highlight=False, soft_wrap=True)

        yield heard
