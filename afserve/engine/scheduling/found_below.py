"""Where the beginning of a prompt was found, beside its node's own cache."""

from typing import NamedTuple


class FoundBelow(NamedTuple):
    """Prompt tokens whose KV came from another node, from host memory and from the disk."""

    peer: int = 0
    host: int = 0
    disk: int = 0

    def plus(self, other: "FoundBelow") -> "FoundBelow":
        return FoundBelow(self.peer + other.peer, self.host + other.host, self.disk + other.disk)


NONE_BELOW = FoundBelow()
