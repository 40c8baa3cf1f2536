"""Where memory comes from that another process can map: the seam to a device's driver.

What is handed over is a file descriptor. It goes over a Unix socket, so the memory has no name that anybody else could
open, and it is gone with the last process that maps it. It knows no peers.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class MemoryRefused(RuntimeError):
    """Memory could not be made, handed over or mapped; the text says what and why."""


class Made(NamedTuple):
    """`memory_B` is as long as was asked for; the driver made `whole` bytes. Whoever made it closes `file`."""

    memory_B: Tensor
    file: int
    whole: int


class MemoryDriver(Protocol):
    """Memory stays mapped as long as there is a tensor of it. What fails raises MemoryRefused."""

    @property
    def name(self) -> str:
        """At most 8 letters. Ends of another driver's name cannot map this one's memory."""

    def make(self, size: int) -> Made:
        """`size` bytes, zeros."""

    def open(self, file: int, size: int, whole: int) -> Tensor:
        """The first `size` bytes of what another process made. The caller closes `file`."""
