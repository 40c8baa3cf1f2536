"""A call that cannot be cut off, made with a deadline: PyTorch's client of a store waits for a stopped server for ever.

The call runs in a thread of its own. One that is late is left behind there: it ends when its peer goes on or dies, and
keeps no process from ending. It knows nothing of what is called.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Late(RuntimeError):
    """The call was not done in time."""


def in_time(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns, or raises of OSError, RuntimeError and ValueError; `Late` when it takes longer."""
    returned: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(call())
        except (OSError, RuntimeError, ValueError) as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="in-time", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise Late(f"no answer within {seconds:g} s")
    return returned[0]
