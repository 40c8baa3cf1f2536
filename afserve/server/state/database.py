"""The state of the gateways of one host: one SQLite file that they share, or memory of one gateway's own.

SQLite never runs on the event loop: one thread per gateway makes all calls, in their order. What is kept is up to the
stores; here are the file, its tables, and transactions.
"""

import asyncio
import os
import sqlite3
import stat
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from afserve.clock import Clock
from afserve.errors import CapacityError, ConfigError

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="Store")
FILE = "gateways.sqlite"
SCHEMA = 1
BUSY_SECONDS = 10.0  # for another gateway's transaction to end
_TABLES = (
    "CREATE TABLE files(seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, name TEXT, purpose TEXT, "
    "created INTEGER, ends REAL, size INTEGER, data BLOB)",
    "CREATE TABLE responses(seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, ends REAL, "
    "size INTEGER, body BLOB, items BLOB, asked BLOB)",
    "CREATE TABLE batches(seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, endpoint TEXT, "
    "file TEXT, status TEXT, total INTEGER, about TEXT, times TEXT, holder TEXT, held_until REAL)",
    "CREATE TABLE answers(batch TEXT, line INTEGER, fine INTEGER, said BLOB, PRIMARY KEY(batch, line))",
    "CREATE TABLE buckets(key TEXT, kind TEXT, level REAL, at REAL, PRIMARY KEY(key, kind))",
    "CREATE TABLE running(key TEXT, holder TEXT, count INTEGER, held_until REAL, PRIMARY KEY(key, holder))",
)
_INDEXES = ("CREATE INDEX IF NOT EXISTS answers_fine ON answers(batch, fine)",)  # also of an older file


class Database:
    """`folder` empty keeps everything in memory. Nothing is opened before the first call."""

    def __init__(self, folder: str = "") -> None:
        self.shared = bool(folder)
        self._folder = folder
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    def transact(self, work: Callable[[sqlite3.Connection], T]) -> Awaitable[T]:
        """The result of `work`, as one transaction: all of it happens or nothing. It is queued when this returns.

        Raises what `work` raises, and CapacityError where the disk is full, or another gateway holds the file too long.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "afserve-state")
        return asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    async def close_file(self) -> None:
        """After what was queued before."""
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown(wait=False)
            self._thread = None

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = connect(self._folder)
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise CapacityError(
                f"the gateway's state could not be read or written ({error}); try again later"
            ) from error
        return result


@dataclass(frozen=True, slots=True)
class Store:
    """Something that is kept there. `clock` has Unix seconds."""

    database: Database
    clock: Clock


def transaction(
    work: Callable[Concatenate[S, sqlite3.Connection, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """A method of a store that runs within one transaction, as `Database.transact` has it."""

    @wraps(work)
    async def transacted(store: S, *args: P.args, **named: P.kwargs) -> T:
        return await store.database.transact(lambda db: work(store, db, *args, **named))

    return transacted  # type: ignore[return-value]  # its first argument has a name


def connect(folder: str) -> sqlite3.Connection:
    """With its tables. Raises ConfigError for a file of a later afserve."""
    connection = sqlite3.connect(
        Path(folder) / FILE if folder else ":memory:", timeout=BUSY_SECONDS, isolation_level=None
    )
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(
        "PRAGMA synchronous=NORMAL"
    )  # a crash of the machine may cost the last moments, never the file
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA):
        connection.close()
        raise ConfigError.about(
            "state-dir", f"{FILE} has format {version}, this afserve reads {SCHEMA}; give another folder"
        )
    if version == 0:
        for table in _TABLES:
            connection.execute(table)
        connection.execute(f"PRAGMA user_version={SCHEMA}")
    for index in _INDEXES:
        connection.execute(index)
    connection.execute("COMMIT")
    return connection


def prepare_folder(path: Path) -> str:
    """Make it, for its user alone, and look whether it can be used. Raises ConfigError before anything is served."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_mode & 0o077:
            raise ConfigError.about(
                "state-dir",
                f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):03o}), and prompts are kept there; "
                f"type: chmod 700 {path}",
            )
        os.close(os.open(path / FILE, os.O_RDWR | os.O_CREAT, 0o600))
        connect(str(path)).close()
    except OSError as error:
        raise ConfigError.about("state-dir", f"{path}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise ConfigError.about(
            "state-dir", f"{path / FILE}: {error}; remove it, or give another folder"
        ) from error
    return str(path.resolve())
