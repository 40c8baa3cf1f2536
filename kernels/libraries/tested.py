"""Kernels of other libraries in the place of our own, op by op, and only what gave the reference's answers here.

A library is asked for by name; each of its ops computes a small case of the very sizes that are served, with rows that
are no numbers among it, and is compared with the reference. One that is not installed, fails or answers otherwise is
not used, and what was the matter is logged once and kept for `explain`. It knows no library and no device.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

log = logging.getLogger("afserve.kernels")
FAILS = Exception  # what compilers, launchers and bindings of others raise has no common parent
Answer = TypeVar("Answer")
STEPS = 8  # roundings of the answer's dtype that two right answers may be apart


class WrongAnswer(Exception):
    """Of a library, in its test."""


@dataclass(slots=True)
class TestedOps:
    """What of a library is used: `passed` has an entry for each op and size that was tested, with what was the matter,
    empty where nothing was."""

    library: str
    passed: dict[tuple[str, Hashable], str] = field(default_factory=dict)

    def test_op(self, op: str, size: Hashable, test: Callable[[], None]) -> bool:
        """Whether `op` may be used for this size; `test` raises where not, and runs once."""
        key = op, size
        if key not in self.passed:
            reason = _reason(test)
            if reason:
                self.refuse(op, size, reason)
            else:
                self.passed[key] = ""
                log.info("%s computes %s of %s", self.library, op, size)
        return not self.passed[key]

    def compute_tested(self, op: str, size: Hashable, call: Callable[[], Answer]) -> Answer | None:
        """What an op answers that was tested and right, else None. One that fails is not asked again."""
        if not self.uses(op, size):
            return None
        try:
            return call()
        except FAILS as error:
            self.refuse(op, size, f"while serving: {_words(error)}")
            return None

    def refuse(self, op: str, size: Hashable, reason: str) -> None:
        """It is used no more."""
        if self.passed.get((op, size)) == reason:
            return
        self.passed[op, size] = reason
        log.warning("%s: %s of %s is not used: %s; own kernels compute it", self.library, op, size, reason)

    def uses(self, op: str, size: Hashable) -> bool:
        """Whether it was tested and right. What nobody tested is not used."""
        return self.passed.get((op, size), "untested") == ""

    def told(self) -> str:
        """Who computes what, for one line."""
        used = sorted({op for (op, _), reason in self.passed.items() if not reason})
        refused = [f"{op} of {size} not: {reason}" for (op, size), reason in self.passed.items() if reason]
        return "; ".join((f"{self.library} computes {', '.join(used) or 'nothing'}", *refused))


def _reason(test: Callable[[], None]) -> str:
    try:
        test()
    except WrongAnswer as wrong:
        return str(wrong)
    except FAILS as error:
        return _words(error)
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def expect_close(name: str, answer: Tensor, truth: Tensor, eps: float = 0.0, least: float = 1.0) -> None:
    """Raises WrongAnswer where they are further apart than roundings, or no numbers are at other places. `eps`: of a
    coarser dtype that was multiplied. Roundings are those of the largest number, of `least` if all are smaller."""
    if answer.shape != truth.shape or answer.dtype is not truth.dtype:
        raise WrongAnswer(
            f"{name} is {answer.dtype} {tuple(answer.shape)}, not {truth.dtype} {tuple(truth.shape)}"
        )
    if not torch.equal(answer.isfinite(), truth.isfinite()):
        raise WrongAnswer(f"{name}: numbers that are none are at other places")
    fine = truth.isfinite()
    apart = (answer.double() - truth.double())[fine].abs()
    bound = STEPS * (eps or torch.finfo(truth.dtype).eps) * max(least, float(truth[fine].abs().max()))
    if float(apart.max()) > bound:
        raise WrongAnswer(f"{name} is off by {float(apart.max()):.3g}, allowed {bound:.3g}")
