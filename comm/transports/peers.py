"""Watches processes of this machine through the kernel, so that a killed peer is noticed without a heartbeat.

It knows a process by its number and by the name that errors use; it knows nothing of what it says.
"""

import os
import select


class PeerProcess:
    """Holds a pidfd, so a process number that is used again is not taken for the old process."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, OverflowError):  # no such process, or a number that none can have
            self._fd = -1

    def gone(self) -> bool:
        """True from the moment on that the process has ended, reaped or not."""
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
