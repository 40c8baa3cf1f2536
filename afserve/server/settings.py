"""What the HTTP side is configured with: limits, deadlines in seconds, keys. Checked once, then read-only."""

from dataclasses import dataclass
from pathlib import Path

from afserve.config import in_range
from afserve.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`api_keys` empty means that no key is asked for. `admin_keys` guard what changes or shows the cluster."""

    max_body_bytes: int = 8 * MIB
    max_header_bytes: int = 64 * 1024
    max_inflight: int = 4096
    max_sequences: int = 256
    read_deadline: float = 30.0
    text_deadline: float = 30.0
    write_deadline: float = 60.0
    drain_deadline: float = 30.0
    keep_alive: float = 30.0
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        in_range("max_body_bytes", self.max_body_bytes, 1024, 1 << 32)
        in_range("max_header_bytes", self.max_header_bytes, 1024, 1 << 24)
        in_range("max_inflight", self.max_inflight, 1, 1 << 20)
        in_range("max_sequences", self.max_sequences, 1, 1 << 16)
        for name in ("read_deadline", "text_deadline", "write_deadline", "keep_alive"):
            in_range(name, getattr(self, name), 0.001, 86_400)
        in_range("drain_deadline", self.drain_deadline, 0, 86_400)


def read_keys(path: str | Path) -> tuple[str, ...]:
    """API keys from a file, one per line; empty lines and lines that begin with # do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api-key-file: {path}: {error.strerror}", param="api-key-file") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"api-key-file: {path} holds no key; write one per line", param="api-key-file")
    return keys
