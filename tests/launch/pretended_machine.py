"""A machine with other NUMA nodes than this one: a folder like /sys/devices/system/node, for `numa.SYSFS`."""

from pathlib import Path


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
