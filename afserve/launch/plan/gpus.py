"""The CUDA devices of this machine, asked of torch in a process of its own: the gateway imports no torch.

As a program (`python -m afserve.launch.plan.gpus`) it prints what it found as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from afserve.child import module
from afserve.errors import ConfigError
from afserve.kernels.devices.kinds import AMD, NOT_HERE, why_not

_PROBE_SECONDS = 120.0  # torch's import and a context on every device


@dataclass(frozen=True, slots=True)
class Gpus:
    """One entry per device; `free` and `total` are bytes. `reach`: each can write the memory of every other. `fp8`: all
    of them multiply FP8 (8.9 or newer). `refused`: why PyTorch's devices here are none, where it has some."""

    names: tuple[str, ...] = ()
    free: tuple[int, ...] = ()
    total: tuple[int, ...] = ()
    reach: bool = False
    refused: str = ""
    fp8: bool = True

    def __len__(self) -> int:
        return len(self.names)

    def device(self, number: int) -> str:
        """Of the node that is the `number`-th of this machine: one of its own while there are enough."""
        return f"cuda:{number % len(self)}"

    def chosen(self, device: str) -> "Gpus":
        """Those that `cuda` or `cuda:N` stands for. Raises ConfigError where there is none."""
        index = device.partition(":")[2]
        if self.refused:
            raise ConfigError(f"--device {device}: {self.refused}")
        if not self.names or (index and int(index) >= len(self)):
            there = f"{len(self)} CUDA device{'s' * (len(self) != 1)}"
            raise ConfigError(f"--device {device}: torch finds {there} here; use --device cpu")
        if not index:
            return self
        n = int(index)
        return Gpus(self.names[n : n + 1], self.free[n : n + 1], self.total[n : n + 1], True, fp8=self.fp8)


def check_device(text: str) -> None:
    """Raises ConfigError unless it is cpu, cuda (a GPU for each node) or cuda:N (all nodes on one)."""
    kind, colon, index = text.partition(":")
    if why := why_not(text):
        raise ConfigError(f"--device {text}: {why}; {NOT_HERE}")
    if text != "cpu" and (kind != "cuda" or (colon and not index.isdecimal())):
        raise ConfigError(
            f"--device: {text!r} is not cpu, cuda (a GPU for each node) or cuda:N (all nodes on that one)"
        )


def probe_gpus(command: Sequence[str] = ()) -> Gpus:
    """`command` is for tests. Raises ConfigError when torch cannot say in time."""
    try:
        done = subprocess.run(
            command or module("afserve.launch.plan.gpus"),
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--device: torch found no CUDA devices within {_PROBE_SECONDS:.0f} s") from error
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError(f"--device: torch could not be asked for CUDA devices: {error}") from error
    sizes = tuple(found["free"]), tuple(found["total"])
    reach, refused = bool(found["reach"]), str(found.get("refused", ""))
    return Gpus(tuple(found["names"]), *sizes, reach, refused, bool(found.get("fp8", True)))


def _look() -> Gpus:
    import torch

    from afserve.kernels.devices import cuda

    if cuda.built_for_amd():  # its devices are called cuda, too
        return Gpus(refused=f"this PyTorch is built for {AMD}; {NOT_HERE}")
    places = [torch.device("cuda", number) for number in range(cuda.count_gpus())]
    chips, memory = [cuda.chip_of(one) for one in places], [cuda.memory_of(one) for one in places]
    return Gpus(
        tuple(chip.name for chip in chips),
        tuple(free for free, _ in memory),
        tuple(total for _, total in memory),
        cuda.all_reach(len(places)),
        fp8=all(chip.capability >= (8, 9) for chip in chips),
    )


if __name__ == "__main__":
    json.dump(asdict(_look()), sys.stdout)
