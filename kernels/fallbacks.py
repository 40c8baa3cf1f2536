"""Which ops a backend handed to PyTorch, and why: nobody shall take the plain path for the fast one.

Every op is told once, as a warning in the log of the process. It knows no tensors and decides nothing.
"""

import logging
from dataclasses import dataclass

log = logging.getLogger("afserve.kernels")


@dataclass(frozen=True, slots=True)
class Fallback:
    """`op` is the name of a method of `Ops`, `reason` what did not fit, e.g. "torch.float16 weights"."""

    op: str
    reason: str


class Fallbacks:
    """In the order in which they were met. Noting one again costs a look-up."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._met: dict[Fallback, None] = {}

    def record_fallback(self, op: str, reason: str) -> None:
        fallback = Fallback(op, reason)
        if fallback in self._met:
            return
        if all(op != met.op for met in self._met):
            log.warning("%s kernels: %s runs in PyTorch: %s", self._backend, op, reason)
        self._met[fallback] = None

    def met(self) -> tuple[Fallback, ...]:
        return tuple(self._met)
