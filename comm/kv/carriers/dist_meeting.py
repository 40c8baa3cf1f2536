"""What gloo asks of a store, said between the two nodes that meet: no store listens, and nobody else can join.

Each of the two sets one value, its address, and waits for the other's. It knows no sockets: what was set goes to `say`.
"""

import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_MOST_KEYS = 16  # gloo sets one at each end
_LENGTH = struct.Struct("<Q")  # before the host's name, and before the address behind it


class PairStore(Store):
    """For one group. gloo's constructor calls it, in its thread; `heard` and `end` come from another one."""

    def __init__(self, say: Callable[[str, bytes], None], seconds: float) -> None:
        super().__init__()
        self._say, self._until = say, time.monotonic() + seconds
        self._known: dict[str, bytes] = {}
        self._own = b""
        self._changed = threading.Condition()
        self._over = False

    def heard(self, key: str, value: bytes) -> None:
        """The other end has set it."""
        with self._changed:
            if len(self._known) < _MOST_KEYS:
                self._known[key] = value
            self._changed.notify_all()

    def end(self) -> None:
        """Who waits gives up."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # ---- gloo's

    def set(self, key: str, value: str | bytes) -> None:
        if self._over:
            raise RuntimeError("this end has given it up")
        self._own = value.encode() if isinstance(value, str) else value
        self.heard(key, self._own)
        self._say(key, self._own)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """`timeout` is what is left of the seconds, at the most. Raises RuntimeError when they are over."""
        with self._changed:
            left = self._until - time.monotonic()
            self._changed.wait_for(lambda: self._over or self._has(keys), left)
            if not self._has(keys):
                raise RuntimeError("the other end has not come to meet it")
            if any(_form(self._known[key]) != _form(self._own) for key in keys):
                raise RuntimeError("the other end does not say where it is as this PyTorch's gloo does")

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def has_extended_api(self) -> bool:
        return False


def _form(value: bytes) -> tuple[int, bytes]:
    """How long it is behind the host's name, and how long it says that its address is: gloo checks neither, and one
    that was cut ends the process."""
    if len(value) < _LENGTH.size:
        return 0, b""
    address = _LENGTH.size + _LENGTH.unpack_from(value)[0]
    return len(value) - address, value[address : address + _LENGTH.size]
