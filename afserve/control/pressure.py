"""How busy this host's processors are, as the kernel says it: /proc/pressure/cpu, which some kernels do not have."""

from pathlib import Path

CPU = Path("/proc/pressure/cpu")


def cpu_pressure(path: Path = CPU) -> float | None:
    """The share of the last ten seconds, in [0, 1], in which something waited for a processor. None where the kernel
    does not say: it is too old, was started without, or this is another system."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return parse_pressure(text)


def parse_pressure(text: str) -> float | None:
    """Of `some avg10=0.29 avg60=0.99 avg300=1.86 total=12819978`, in per cent there."""
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        fields = dict(part.partition("=")[::2] for part in rest.split())
        if kind == "some" and "avg10" in fields:
            try:
                value = float(fields["avg10"]) / 100.0
            except ValueError:
                return None
            return min(1.0, value) if value >= 0.0 else None
    return None
