"""What any library may do in the place of our own kernels, and those that a backend asks, one after the other.

An adapter is a file of this folder with a class of `Library` that is called `Adapter`, and has the methods of what its
library computes; None, or False, is an answer: not for these. Its tests run at load, by the sizes of layers. Shapes as
in `reference.py`.
"""

import logging
import re
from collections.abc import Sequence
from importlib import import_module, metadata
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from afserve.config_texts import GPU_LIBRARIES, INSTALLED, libraries_of
from afserve.errors import ConfigError
from afserve.kernels.delta import DeltaShape
from afserve.kernels.libraries.products import GroupedProducts
from afserve.kernels.libraries.tested import FAILS, TestedOps
from afserve.kernels.packed import ExpertShape
from afserve.kernels.paged import PagedBatch
from afserve.kernels.states.rules import OWN, StateMoves

log = logging.getLogger("afserve.kernels")
HALVES = (torch.bfloat16, torch.float16)


class Library:
    """`module` is the imported package. `OLDEST` is the first version whose signatures are those of the adapter."""

    DISTRIBUTION: ClassVar[str]
    OLDEST: ClassVar[str]

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        """Raises ImportError where the package lacks what is called."""
        self.version = version_of(self.DISTRIBUTION, module)
        self.ops = TestedOps(f"{self.DISTRIBUTION} {self.version}")
        self._device = device

    def test_norms(self, hidden: int, dtype: torch.dtype) -> None:
        """For rows of a layer that is served."""

    def test_attention(
        self, heads: int, k_NGBD: Tensor, v_NGBD: Tensor, scale: float, window: int | None
    ) -> None:
        """For a cache that a layer is bound to."""

    def test_delta(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        """For a layer with such states, whose rows are of `dtype`."""

    def norm_rows(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        return None

    def norm_sums(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        """x_TH becomes the sum; nothing is done where the answer is None."""
        return None

    def attend_decode(
        self, q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None
    ) -> Tensor | None:  # fmt: skip
        """Where every sequence has one query."""
        return None

    def moves(self, shape: DeltaShape, dtype: torch.dtype) -> StateMoves | None:
        """Who moves states of such layers, for rows of `dtype`."""
        return None

    def products(self, shape: ExpertShape) -> GroupedProducts | None:
        """For slots of FP8 weights that are made; tested here."""
        return None


class Libraries:
    """Those that were asked for: the first one that answers does. Without any, own kernels compute everything."""

    def __init__(self, opened: Sequence[Library] = ()) -> None:
        self.opened = tuple(opened)

    @classmethod
    def open_named(cls, gpu_kernels: str, device: torch.device) -> "Libraries":
        """As `--gpu-kernels` says. Raises ConfigError where one of them that was named cannot be imported or is too
        old; where those are meant that are installed, the log says so."""
        opened = []
        for name in libraries_of(gpu_kernels):
            try:
                opened.append(open_library(name, device))
            except ConfigError as error:
                if gpu_kernels != INSTALLED:
                    raise
                log.info("%s", error)
        return cls(opened)

    def tell_libraries(self) -> str:
        """Who computes what, behind the backend's own words."""
        return "".join(f"; {library.ops.told()}" for library in self.opened)

    def test_norms(self, hidden: int, dtype: torch.dtype) -> None:
        for library in self.opened:
            library.test_norms(hidden, dtype)

    def test_attention(
        self, heads: int, k_NGBD: Tensor, v_NGBD: Tensor, scale: float, window: int | None
    ) -> None:
        for library in self.opened:
            library.test_attention(heads, k_NGBD, v_NGBD, scale, window)

    def test_delta(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        for library in self.opened:
            library.test_delta(shape, dtype)

    def norm_rows(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        found = (library.norm_rows(x_TH, weight_H, eps) for library in self.opened)
        return next((normed_TH for normed_TH in found if normed_TH is not None), None)

    def norm_sums(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        found = (library.norm_sums(x_TH, y_TH, weight_H, eps) for library in self.opened)
        return next((normed_TH for normed_TH in found if normed_TH is not None), None)

    def attend_decode(
        self, q_TAD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch, scale: float, window: int | None
    ) -> Tensor | None:  # fmt: skip
        cache = k_NGBD, v_NGBD
        found = (library.attend_decode(q_TAD, *cache, batch, scale, window) for library in self.opened)
        return next((seen_TAD for seen_TAD in found if seen_TAD is not None), None)

    def moves(self, shape: DeltaShape, dtype: torch.dtype) -> StateMoves:
        found = (library.moves(shape, dtype) for library in self.opened)
        return next((moves for moves in found if moves is not None), OWN)

    def products(self, shape: ExpertShape) -> GroupedProducts | None:
        found = (library.products(shape) for library in self.opened)
        return next((products for products in found if products is not None), None)


def missed(name: str, device: torch.device) -> str:
    """Why a library cannot be used on this device, before any op was tested; empty where it can."""
    try:
        open_library(name, device)
    except ConfigError as error:
        return str(error)
    return ""


def open_library(name: str, device: torch.device) -> Library:
    """Raises ConfigError that says what is the matter."""
    try:
        adapter = import_module(f"{__package__}.{name.replace('-', '_')}").Adapter
        opened: Library = adapter(import_module(GPU_LIBRARIES[name]), device)
    except ConfigError:
        raise
    except FAILS as error:
        raise ConfigError(
            f"--gpu-kernels: {name} cannot be imported ({error}); pip install 'afserve[{name}]', or leave it out: own "
            "kernels compute everything",
            param="gpu_kernels",
        ) from error
    if numbers_of(opened.version) < numbers_of(opened.OLDEST):
        raise ConfigError(
            f"--gpu-kernels: {name} is {opened.DISTRIBUTION} {opened.version} here, and {opened.OLDEST} is the oldest "
            f"whose calls are known; pip install -U 'afserve[{name}]'",
            param="gpu_kernels",
        )
    return opened


def version_of(distribution: str, module: ModuleType) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "0"))


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers: 0.6.7.post1 -> (0, 6, 7)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
