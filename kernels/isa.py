"""Which instruction sets of the native library this machine runs, and the refusal of any other.

The library itself chooses by what processor and system say (native/isa.cpp). Nothing here imports torch.
"""

import socket
from functools import cache

from afserve.config import AUTO, ISAS
from afserve.errors import ConfigError

DIFFERENT_ISAS = (
    "Tokens have the same bits in any topology of one set; here they depend on which node computes them. "
    "--isa with a set that all hosts have makes them alike."
)


@cache
def isas_here() -> tuple[str, ...]:
    """The best first, which is what `auto` takes; none where the library was not built."""
    try:
        from afserve.kernels import _native
    except ImportError:
        return ()

    def runs(isa: str) -> bool:
        try:
            return bool(_native.Engine(1, isa).isa)
        except ValueError:
            return False

    return tuple(isa for isa in ISAS if runs(isa))


def used_isa(asked: str = AUTO) -> str:
    """What kernels of this machine's CPU compute with when a run asks for that; empty without the library."""
    return next(iter(isas_here()), "") if asked == AUTO else asked


def check_isa(isa: str) -> None:
    """Raises ConfigError where this machine does not run it; `auto` is always fine."""
    here = isas_here()
    if isa == AUTO or isa in here:
        return
    has = f"has {', '.join(here)}" if here else "has no native library: reinstall afserve with a C++ compiler"
    raise ConfigError(
        f"--isa: {isa} does not run on {socket.gethostname()}, which {has}; leave it out for the best one",
        param="isa",
    )
