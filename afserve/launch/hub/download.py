"""Bytes from a hub into files: resumed where they broke off, and checked before they have their name.

A file that is on its way is called `.part`. It gets its digest for a name once all its bytes have that digest, so what
lies in the cache is whole, whenever the process ends.

It is made by hand although huggingface_hub is installed with tokenizers: that (2.4) compares a file's length with what
the hub lists, not its digest, so bytes that were altered on the way would be served. It would take the place of
`_listing` and `_go_on`, some 35 lines; which files a role reads, room on the disk, digests, and refusals in words that
say what to do would stay. Mirrors (HF_ENDPOINT), tokens and the cache are those of its tools (`cache.py`).
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx

from afserve import __version__
from afserve.errors import (
    AuthError,
    CheckpointError,
    ConfigError,
    NotFoundError,
    PeerLost,
    ProtocolError,
    UserError,
)
from afserve.launch.hub.cache import PART
from afserve.launch.hub.listing import HubFile, Listing

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRIES = 5  # in a row without a new byte
_PIECE = 1 << 20
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_MOST_LISTING = 64 << 20
Progress = Callable[[HubFile, int], None]  # bytes that are here, all of them once checked; from any thread


class Hub:
    """One hub and one model. `with` closes its connections."""

    def __init__(self, model: str, endpoint: str, token: str | None, pause: float = 1.0) -> None:
        """`pause` in seconds, doubled with each try in vain."""
        self.model, self.endpoint, self._pause = model, endpoint.rstrip("/"), pause
        headers = {"user-agent": f"afserve/{__version__}"} | (
            {"authorization": f"Bearer {token}"} if token else {}
        )
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True)

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def listing(self, revision: str) -> Listing:
        """Raises NotFoundError, AuthError or PeerLost, saying what to do."""
        path = f"/api/models/{self.model}/revision/{quote(revision, safe='')}"
        for left in reversed(range(_TRIES)):
            try:
                return Listing.read(json.loads(self._listing(self.endpoint + path, revision)))
            except (httpx.TransportError, _Busy) as error:
                if not left:
                    raise self._unreachable(error) from error
                time.sleep(self._pause * 2 ** (_TRIES - 1 - left))
            except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
                raise ConfigError(f"HF_ENDPOINT {self.endpoint}: {error}") from error
            except httpx.DecodingError as error:
                raise ProtocolError(f"{self.endpoint}{path}: {error}") from error
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"{self.endpoint}{path}: no JSON: {error}") from error
        raise AssertionError

    def _listing(self, url: str, revision: str) -> bytes:
        """Its body, which is read no further than its limit."""
        with self._http.stream("GET", url, params={"blobs": "true"}) as response:
            self._check(response, f"revision {revision}")
            body = bytearray()
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _MOST_LISTING:
                    raise ProtocolError(f"{url}: a listing of more than {_MOST_LISTING:,} bytes")
            return bytes(body)

    def fetch(self, commit: str, file: HubFile, blob: Path, progress: Progress) -> None:
        """`blob` is there and whole at the end. Raises CheckpointError where the hub has other bytes than it listed."""
        if blob.is_file() and blob.stat().st_size == file.size:
            progress(file, file.size)
            return
        part, tries = blob.with_name(blob.name + PART), 0
        while (had := _size(part)) < file.size or not part.exists():
            try:
                self._go_on(commit, file, part, had, progress)
            except (httpx.TransportError, _Busy) as error:
                tries = 1 if _size(part) > had else tries + 1
                if tries >= _TRIES:
                    raise self._unreachable(error) from error
                time.sleep(self._pause * 2 ** (tries - 1))
            except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
                raise ProtocolError(f"{self.endpoint}: {file.name}: {error}") from error
        _check_digest(file, part)
        os.replace(part, blob)
        progress(file, file.size)

    def _go_on(self, commit: str, file: HubFile, part: Path, had: int, progress: Progress) -> None:
        """Appends what one connection brings."""
        url = f"{self.endpoint}/{self.model}/resolve/{commit}/{quote(file.name)}"
        headers = {"range": f"bytes={had}-"} if had else {}
        with self._http.stream("GET", url, headers={**headers, "accept-encoding": "identity"}) as response:
            self._check(response, file.name)
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            if resumed and not response.headers.get("content-range", "").startswith(f"bytes {had}-"):
                raise ProtocolError(f"{url}: answered another range than bytes {had}-")
            with part.open("ab" if resumed else "wb") as out:
                here = had if resumed else 0
                for piece in response.iter_raw():
                    here += len(piece)
                    if here > file.size:
                        out.truncate(0)
                        raise CheckpointError(f"{file.name}: is longer than the {file.size:,} bytes listed")
                    out.write(piece)
                    if here < file.size:
                        progress(file, here)
        if here < file.size:
            raise httpx.RemoteProtocolError(f"{file.name}: it broke off at byte {here:,}")

    def _check(self, response: httpx.Response, what: str) -> None:
        status, where = response.status_code, f"{self.endpoint}: {self.model}: {what}"
        if response.is_success:
            return
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise AuthError(
                f"{where}: refused ({status}); ask for access on the hub and put your token into HF_TOKEN, or check "
                "the name"
            )
        if status == httpx.codes.NOT_FOUND:
            raise NotFoundError(f"{where}: not found there; check the name and the revision", param="model")
        if status == httpx.codes.TOO_MANY_REQUESTS or status >= 500:
            raise _Busy(f"{what}: answered {status}")
        raise UserError(f"{where}: answered {status}")

    def _unreachable(self, error: Exception) -> PeerLost:
        return PeerLost(
            self.endpoint, f"{error or type(error).__name__}; what has come is kept, start it again"
        )


class _Busy(Exception):
    """The hub may answer later."""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_digest(file: HubFile, part: Path) -> None:
    found = file.hash()
    with part.open("rb") as data:
        while piece := data.read(_PIECE):
            found.update(piece)
    if found.hexdigest() != file.digest:
        part.unlink()
        raise CheckpointError(
            f"{file.name}: its bytes have another digest than the hub lists; fetch it again"
        )
