"""A call that cannot be cut off, made with a deadline: PyTorch's client of a store waits for a stopped server for ever.

The call runs in a thread of its own. One that is late is left behind there: it ends when its peer goes on or dies, and
keeps no process from ending. It knows nothing of what is called.
"""

import select
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from afserve.comm.transports.encrypted import Connection

T = TypeVar("T")
_LOOK_SECONDS = 0.05  # between two looks at a connection


class Late(RuntimeError):
    """The call was not done in time."""


def in_time(seconds: float, call: Callable[[], T], connection: Connection | None = None) -> T:
    """What `call` returns, or raises of OSError, RuntimeError and ValueError; `Late` when it takes longer, or when the
    peer at the other end of `connection`, who says nothing meanwhile, hangs up."""
    returned: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(call())
        except (OSError, RuntimeError, ValueError) as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="in-time", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(left, _LOOK_SECONDS))
        if connection is not None and thread.is_alive() and _hung_up(connection):
            raise Late("it hung up")
    if raised:
        raise raised[0]
    if not returned:
        raise Late(f"no answer within {seconds:g} s")
    return returned[0]


def _hung_up(connection: Connection) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
