"""Parts of a stream's body, written to its socket at once: nobody waits, and no layer between is asked.

What has to wait goes the long way, which knows how. Whether a part may be written is asked before it is made.
"""

from starlette.types import Scope

from afserve.server.http.access_log import Seen
from afserve.server.http.connections import CONNECTION
from afserve.server.http.protocol import LimitedHTTP

_STATE = "afserve.direct"


class Direct:
    """Of one answer in chunks that has begun. What is written counts as `seen`.

    It holds what it asks for each token, not the connection: a step of many streams finds little of any in the cache.
    """

    __slots__ = ("_cycle", "_flow", "_seen", "_write")

    def __init__(self, http: LimitedHTTP, seen: Seen) -> None:
        self._cycle, self._flow, self._write, self._seen = http.cycle, http.flow, http.transport.write, seen

    def takes_more(self) -> bool:
        """Whether the client is there and takes more now."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write_chunk(self, data: bytes) -> None:
        """One chunk, as h11 writes it: of its state a chunk changes nothing."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        self._seen.sent += len(data)


def offer(scope: Scope, seen: Seen) -> None:
    """Where the request came by a socket, and its answer goes in chunks."""
    http = scope["state"].get(CONNECTION)
    if isinstance(http, LimitedHTTP) and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
        scope["state"][_STATE] = Direct(http, seen)


def direct_of(scope: Scope) -> Direct | None:
    found = scope.get("state", {}).get(_STATE)
    return found if isinstance(found, Direct) else None
