"""A machine with other NUMA nodes than this one: a folder like /sys/devices/system/node, for `numa.SYSFS`.

As a program it is `afserve` on such a machine: the folder, then what `afserve` is given.
"""

import sys
from pathlib import Path

from afserve.cli.main import main
from afserve.launch.plan import numa


def pretend(root: Path, *nodes: tuple[str, int], near: int = 10, far: int = 21) -> Path:
    """Each node's cores as the kernel writes them, and its KiB of memory."""
    for number, (cores, kib) in enumerate(nodes):
        away = " ".join(str(near if other == number else far) for other in range(len(nodes)))
        write(root, number, cores, kib, away)
    return root


def write(root: Path, number: int, cores: str, kib: int, away: str) -> None:
    folder = root / f"node{number}"
    folder.mkdir(parents=True)
    sizes = {"MemTotal": kib, "MemFree": kib // 2}
    lines = [f"Node {number} {name}:       {size} kB\n" for name, size in sizes.items()]
    (folder / "meminfo").write_text("".join(lines), encoding="ascii")
    (folder / "cpulist").write_text(f"{cores}\n", encoding="ascii")
    (folder / "distance").write_text(f"{away}\n", encoding="ascii")


if __name__ == "__main__":
    numa.SYSFS = Path(sys.argv.pop(1))
    main()
