"""Whose request it is and what it uses: one account per key at this gateway, told to the shared ledger.

A key without limits costs nothing here. One with limits costs a transaction when a request begins and one when it
ends; while requests run, their tokens are told every few seconds.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.types import Scope

from afserve.clock import Clock, WallClock
from afserve.errors import AuthError, CapacityError, shown
from afserve.server.access.classes import ServiceClasses
from afserve.server.access.key_file import Key
from afserve.server.access.keyring import Keyring
from afserve.server.access.ledger import HELD_SECONDS, KeyStanding, Ledger, RateLimitedError
from afserve.server.bodies.declared import Scheduling
from afserve.server.state.database import Database

TELL_SECONDS = HELD_SECONDS / 3
STATE = "account"  # of a request's scope
log = logging.getLogger("afserve.server")


@dataclass(slots=True)
class Account:
    """`owner` is whose files, batches and responses these are: the key's name, nothing where no key is asked for."""

    owner: str = ""
    key: Key | None = None
    spent: int = 0
    running: int = 0
    shares_prefixes: bool = False
    classes: ServiceClasses = field(default_factory=ServiceClasses)

    def spend(self, tokens: int) -> None:
        """Prompt tokens or generated ones."""
        self.spent += tokens

    def scheduled(self, asked: Scheduling) -> Scheduling:
        """No earlier turn than the key's requests get, the key's share, and cached prompts of its own; all else as its
        class of service has it. Raises RequestError where that is none of this server's, or not for this key."""
        one = self.classes.class_of(asked.service_class, self.owner)
        own = self._as_keyed(asked)
        return own if one is None else self._no_sooner(one.applied(own, asked.priority))

    def _no_sooner(self, scheduling: Scheduling) -> Scheduling:
        """The key's limit holds for every class."""
        earliest = None if self.key is None else self.key.limits.priority
        if earliest is None or scheduling.priority >= earliest:
            return scheduling
        return replace(scheduling, priority=earliest)

    def _as_keyed(self, asked: Scheduling) -> Scheduling:
        if self.key is None:
            return asked
        earliest = self.key.limits.priority
        priority = asked.priority if earliest is None else max(asked.priority, earliest)
        salt = asked.cache_salt if self.shares_prefixes else _salt(self.key.name, asked.cache_salt)
        share = self.key.limits.share or 1
        return replace(asked, priority=priority, cache_salt=salt, tenant=self.key.name, share=share)


def _salt(name: str, asked: str) -> str:
    """No other key's, whatever a client asks for: cached tokens, which usage tells, would tell who sent what."""
    try:
        return hashlib.sha256(f"{name}\0{asked}".encode()).hexdigest()
    except UnicodeEncodeError:
        return asked  # which is refused


def account_of(scope: Scope) -> Account:
    """Of a request that has passed the gate."""
    found = scope.get("state", {}).get(STATE)
    return found if isinstance(found, Account) else Account()


def owner_of(request: Request) -> str:
    return account_of(request.scope).owner


class Accounts:
    def __init__(
        self,
        ring: Keyring,
        database: Database,
        clock: Clock | None = None,
        *,
        shares_prefixes: bool = False,
        classes: ServiceClasses | None = None,
    ) -> None:
        """`shares_prefixes`: prompts of one key are found in the cache by those of the others. `classes` are those of
        service."""
        self._classes = classes or ServiceClasses()
        self.ring, self._database, self._shares_prefixes = ring, database, shares_prefixes
        self._clock = clock or WallClock()
        self._holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._of: dict[str, Account] = {}
        self._telling: asyncio.Task[None] | None = None
        self._going_on: set[asyncio.Task[None]] = set()

    def account_for(self, key: Key | None) -> Account:
        """The one account of a key here; its limits are those that the key has now."""
        if key is None:
            return Account(classes=self._classes)
        account = self._of.setdefault(
            key.name, Account(key.name, shares_prefixes=self._shares_prefixes, classes=self._classes)
        )
        account.key = key
        return account

    def account_named(self, owner: str) -> Account:
        """For a batch that goes on without its connection. Raises AuthError where the key is in force no more."""
        key = self.ring.key_named(owner)
        if key is None and owner:
            raise AuthError(f"the key {shown(owner)} was revoked, or is none of this server's any more")
        return self.account_for(key)

    @asynccontextmanager
    async def one_more(self, account: Account) -> AsyncIterator[KeyStanding]:
        """Around one request of a key that has limits. Raises RateLimitedError."""
        key = account.key
        if key is None or not key.limits.counted:
            yield KeyStanding()
            return
        standing = await self._enter(account, key)
        try:
            yield standing
        finally:
            account.running -= 1
            await asyncio.shield(self._tell(account, key))

    def goes_on(self, account: Account, work: Iterable[asyncio.Task[None]], *, adopted: bool = False) -> None:
        """A request is computed though its connection ends: it counts until this work is done.

        Of one that another gateway began, and that this one has `adopted`, nobody knows yet that it runs here.
        """
        left, key = [task for task in work if not task.done()], account.key
        if key is None or not key.limits.counted or not left:
            return
        account.running += 1
        counting = asyncio.create_task(self._until_done(account, key, left, adopted))
        self._going_on.add(counting)
        counting.add_done_callback(self._going_on.discard)

    async def _until_done(
        self, account: Account, key: Key, work: list[asyncio.Task[None]], adopted: bool
    ) -> None:
        try:
            if adopted:
                await self._tell(account, key)
                self._go_on_telling()
            await asyncio.wait(work)
        finally:
            account.running -= 1
        await self._tell(account, key)

    async def _enter(self, account: Account, key: Key) -> KeyStanding:
        """What runs here counts at once: two requests that come together are two."""
        here, spent = account.running, account.spent
        account.running += 1
        account.spent = 0

        def enter(db: sqlite3.Connection) -> KeyStanding:
            return Ledger(db, self._holder, self._clock.now()).enter(key, here, spent)

        try:
            standing = await self._database.transact(enter)
        except BaseException as error:
            account.running -= 1
            account.spent += spent
            if isinstance(error, RateLimitedError) and not account.running:
                await asyncio.shield(self._tell(account, key))
            raise
        self._go_on_telling()
        return standing

    def _go_on_telling(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._keep_telling())

    async def _tell(self, account: Account, key: Key) -> None:
        spent, here = account.spent, account.running
        account.spent = 0

        def book(db: sqlite3.Connection) -> None:
            Ledger(db, self._holder, self._clock.now()).book(key, here, spent)

        try:
            await self._database.transact(book)
        except CapacityError as error:
            account.spent += spent
            log.warning("what key %s has used is told later: %s", key.name, error.message)

    async def _keep_telling(self) -> None:
        """While anything runs, so that others count it and see its tokens."""
        while busy := [account for account in self._of.values() if account.running]:
            await asyncio.sleep(TELL_SECONDS)
            for account in busy:
                if account.key is not None and account.key.limits.counted:
                    await self._tell(account, account.key)

    async def stop_telling(self) -> None:
        tasks = [*self._going_on, *filter(None, [self._telling])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
