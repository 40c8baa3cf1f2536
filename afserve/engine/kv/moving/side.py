"""The KV wing as a node's loop sees it: requests that wait for blocks go in, those that wait no more come out."""

from collections.abc import Iterable
from typing import Protocol

from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent


class KvSide(Protocol):
    """What an attention node's loop needs of the KV wing."""

    @property
    def busy(self) -> bool:
        """Whether `turn` has to be called several times a second."""
        ...

    @property
    def eager(self) -> bool:
        """Whether `turn` has something to do at once."""
        ...

    @property
    def holding(self) -> bool:
        """Whether this node must stay, for others still pull its blocks."""
        ...

    def pull(self, request: GenerationRequest, source: KvSource) -> bool:
        """Whether the request waits for its blocks; `turn` returns it."""
        ...

    def restore(self, request: GenerationRequest) -> bool:
        """Whether the request, which nobody has blocks for, waits for those below the cache; `turn` returns it."""
        ...

    def part(self, number: int) -> None:
        """This request goes on elsewhere, and may ask for its blocks."""
        ...

    def cancel(self, number: int) -> None:
        """May be said of any request."""
        ...

    def computed(self, event: TokenEvent) -> None:
        """An event of what is computed here for another node."""
        ...

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        """These nodes keep copies of what is computed here from now on."""
        ...

    def turn(self) -> list[GenerationRequest]:
        """Once per turn of the loop; requests that wait no more."""
        ...


class NoKv:
    """Of a node whose KV stays where it is."""

    busy = eager = holding = False

    def pull(self, request: GenerationRequest, source: KvSource) -> bool:
        return False

    def restore(self, request: GenerationRequest) -> bool:
        return False

    def part(self, number: int) -> None:
        """Nobody will ask."""

    def cancel(self, number: int) -> None:
        """Nothing was pulled."""

    def computed(self, event: TokenEvent) -> None:
        """Nobody asked for anything."""

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        """Nothing is copied."""

    def turn(self) -> list[GenerationRequest]:
        return []
