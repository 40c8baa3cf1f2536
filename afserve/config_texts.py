"""Texts of settings as users write them: sizes in bytes such as 100GiB or 500 MB, and names of libraries."""

import re

from afserve.errors import ConfigError, shown

OWN, INSTALLED = "auto", "installed"
GPU_LIBRARIES = {"flashinfer": "flashinfer", "deep-gemm": "deep_gemm", "fla": "fla"}
"""Whose kernels may stand in the place of our own on GPUs, the first before the others: by the name that --gpu-kernels
and an extra of afserve have for it, the package that is imported. Its adapter has that name in `kernels/libraries`."""
_UNITS = {f"{letter}{end}": base ** (power + 1)
          for power, letter in enumerate("KMGT") for end, base in (("iB", 1024), ("B", 1000))}  # fmt: skip
_LEAST, _MOST = 1 << 20, 1 << 50


def bytes_of(name: str, text: str) -> int:
    """Raises ConfigError naming the setting where the text is no size between 1 MiB and 1,024 TiB."""
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ConfigError(
            f"{name}: {shown(text)} is not a size such as 100GiB", param=name.strip("-").replace("-", "_")
        )
    size = int(float(found[1]) * units[found[2]])
    if not _LEAST <= size <= _MOST:
        raise ConfigError(
            f"{name}: {shown(text)} is outside [1MiB, 1024TiB]", param=name.strip("-").replace("-", "_")
        )
    return size


def libraries_of(gpu_kernels: str) -> tuple[str, ...]:
    """Names of GPU_LIBRARIES, in their order; all of them where those are meant that are installed. Raises ConfigError
    for others."""
    if gpu_kernels in (OWN, INSTALLED):
        return () if gpu_kernels == OWN else tuple(GPU_LIBRARIES)
    asked = gpu_kernels.split(",")
    if unknown := [name for name in asked if name not in GPU_LIBRARIES]:
        known = ", ".join((OWN, INSTALLED, *GPU_LIBRARIES))
        raise ConfigError(f"--gpu-kernels: {shown(unknown[0])} is none of {known}", param="gpu_kernels")
    return tuple(name for name in GPU_LIBRARIES if name in asked)
