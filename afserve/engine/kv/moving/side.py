"""The KV wing as a node's loop sees it: requests that wait for blocks go in, those that wait no more come out."""

from collections.abc import Iterable

from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent


class KvSide:
    """Of a node whose KV stays where it is; `KvMoves` is the other kind."""

    @property
    def busy(self) -> bool:
        """Whether `turn` has to be called several times a second."""
        return False

    @property
    def eager(self) -> bool:
        """Whether `turn` has something to do at once."""
        return False

    @property
    def holding(self) -> bool:
        """Whether this node must stay, for others still pull its blocks."""
        return False

    def pull(self, request: GenerationRequest, source: KvSource) -> bool:
        """Whether the request waits for its blocks; `turn` returns it."""
        return False

    def restore(self, request: GenerationRequest) -> bool:
        """Whether the request, which nobody has blocks for, waits for those below the cache; `turn` returns it."""
        return False

    def part(self, number: int) -> None:
        """This request goes on elsewhere, and may ask for its blocks."""

    def cancel(self, number: int) -> None:
        """May be said of any request."""

    def computed(self, event: TokenEvent) -> None:
        """An event of what is computed here for another node."""

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        """These nodes keep copies of what is computed here from now on."""

    def turn(self) -> list[GenerationRequest]:
        """Once per turn of the loop; requests that wait no more."""
        return []
