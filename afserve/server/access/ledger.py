"""What keys have used, in the state that gateways of a host share: buckets of requests and tokens, and what runs.

The gateway's own view of a key is `accounts`.
"""

import math
import sqlite3
from dataclasses import dataclass

from afserve.errors import OverloadedError
from afserve.server.access.key_file import Key

HELD_SECONDS = 30.0  # after which what a gateway said to run counts no more, unless it says so again
REQUESTS, TOKENS = "requests", "tokens"


@dataclass(frozen=True, slots=True)
class Bucket:
    """What may be used now: at most `most`, which is also what comes in per minute, steadily. `at` in seconds.

    It may go below zero: tokens are known once they have been used. Nobody gets more until it is above again.
    """

    most: int
    level: float
    at: float

    @classmethod
    def full(cls, most: int, now: float) -> "Bucket":
        return cls(most, float(most), now)

    def filled(self, now: float) -> "Bucket":
        """A clock that was set back adds nothing."""
        more = max(0.0, now - self.at) * self.most / 60.0
        return Bucket(self.most, min(float(self.most), self.level + more), now)

    def less(self, amount: float) -> "Bucket":
        return Bucket(self.most, self.level - amount, self.at)

    def seconds_until(self, wanted: float) -> float:
        """Until it holds so much, if nobody takes from it."""
        return max(0.0, (wanted - self.level) * 60.0 / self.most)

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + 1e-9))


class RateLimitedError(OverloadedError):
    """One key's own limit; another key's requests are not affected. `standing` is what its headers say."""

    kind = "rate_limit_error"

    def __init__(self, message: str, standing: "KeyStanding", retry_after: float) -> None:
        super().__init__(message, retry_after=retry_after)
        self.standing = standing


@dataclass(frozen=True, slots=True)
class KeyStanding:
    """A key's buckets after a request; None without that limit."""

    requests: Bucket | None = None
    tokens: Bucket | None = None

    def headers(self) -> dict[str, str]:
        """As OpenAI's clients read them; `reset` is when all may be used again."""
        found = {}
        for name, bucket in ((REQUESTS, self.requests), (TOKENS, self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.most)
                found[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining)
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.most):.3f}s"
        return found


@dataclass(frozen=True, slots=True)
class Ledger:
    """`holder` names this gateway's process. Its methods run within one transaction."""

    db: sqlite3.Connection
    holder: str
    now: float

    def enter(self, key: Key, here: int, spent: int) -> KeyStanding:
        """One more request beside `here` that run at this gateway, which have used `spent` tokens since it last told.

        Raises RateLimitedError, and what was spent counts all the same: see `book`.
        """
        limits = key.limits
        requests = self._bucket(key, REQUESTS, limits.requests_per_minute)
        tokens = self._bucket(key, TOKENS, limits.tokens_per_minute)
        tokens = tokens.less(spent) if tokens is not None else None
        standing = KeyStanding(requests, tokens)
        elsewhere = self._elsewhere(key) if limits.concurrent else 0
        if limits.concurrent and here + elsewhere >= limits.concurrent:
            raise RateLimitedError(
                f"concurrent: {here + elsewhere} requests of this key are being answered, at most {limits.concurrent} "
                "are; send it again when one has ended",
                standing,
                1.0,
            )
        if requests is not None and requests.level < 1:
            raise _over("requests_per_minute", requests, standing, requests.seconds_until(1))
        if tokens is not None and tokens.level <= 0:
            raise _over("tokens_per_minute", tokens, standing, tokens.seconds_until(1))
        standing = KeyStanding(None if requests is None else requests.less(1), tokens)
        self._write(key, standing)
        self._run(key, here + 1)
        return standing

    def book(self, key: Key, here: int, spent: int) -> None:
        """How many run at this gateway, and what they have used since it last told."""
        tokens = self._bucket(key, TOKENS, key.limits.tokens_per_minute)
        self._write(key, KeyStanding(None, None if tokens is None else tokens.less(spent)))
        self._run(key, here)

    def _bucket(self, key: Key, kind: str, most: int | None) -> Bucket | None:
        if most is None:
            return None
        row = self.db.execute(
            "SELECT level, at FROM buckets WHERE key=? AND kind=?", (key.name, kind)
        ).fetchone()
        return Bucket.full(most, self.now) if row is None else Bucket(most, *row).filled(self.now)

    def _write(self, key: Key, standing: KeyStanding) -> None:
        for kind, bucket in ((REQUESTS, standing.requests), (TOKENS, standing.tokens)):
            if bucket is not None:
                row = (key.name, kind, bucket.level, bucket.at)
                self.db.execute("INSERT OR REPLACE INTO buckets VALUES(?,?,?,?)", row)

    def _elsewhere(self, key: Key) -> int:
        found = self.db.execute(
            "SELECT coalesce(sum(count), 0) FROM running WHERE key=? AND holder!=? AND held_until>?",
            (key.name, self.holder, self.now),
        )
        return int(found.fetchone()[0])

    def _run(self, key: Key, count: int) -> None:
        if not key.limits.concurrent:
            return
        if count:
            row = (key.name, self.holder, count, self.now + HELD_SECONDS)
            self.db.execute("INSERT OR REPLACE INTO running VALUES(?,?,?,?)", row)
        else:
            self.db.execute("DELETE FROM running WHERE key=? AND holder=?", (key.name, self.holder))


def _over(name: str, bucket: Bucket, standing: KeyStanding, seconds: float) -> RateLimitedError:
    return RateLimitedError(
        f"{name}: this key has used its {bucket.most} per minute; send it again in {seconds:.1f} s",
        standing,
        seconds,
    )
