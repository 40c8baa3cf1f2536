"""What a node proves to another one before either says anything: the run's token, and where hosts have them a
certificate; and which life of its place it is. Nothing here checks any of it (`comm/transports/greeting` does)."""

from dataclasses import dataclass, field

from afserve.tls import Certificates


@dataclass(frozen=True, slots=True)
class Credentials:
    """`generation` counts the processes that have had this node's place: a later one takes it from an earlier one."""

    token: str = field(default="", repr=False)
    certificates: Certificates | None = None
    generation: int = 0


NOBODYS = Credentials()
"""Of ends that open no port, or of one process: everybody has this token."""
