"""Tells others what a node's cache has: gateways its beginnings, and receivers of KV events each block."""

from typing import TYPE_CHECKING

from afserve.adviser import Adviser
from afserve.clock import MonotonicClock
from afserve.control.node.gateways import GatewayStreams
from afserve.control.node.prefixes import PrefixTeller
from afserve.control.wire.values import Assigned
from afserve.engine.kv.told import ToldCache
from afserve.errors import ConfigError
from afserve.kv_events_config import kv_events_of

if TYPE_CHECKING:
    from afserve.control.node.kv_events import KvEventPublisher


class CacheTeller:
    """`tell_changes` once per turn of the node's loop."""

    def __init__(
        self, told: ToldCache, gateways: GatewayStreams, publisher: "KvEventPublisher | None"
    ) -> None:
        self._told, self._clock = told, MonotonicClock()
        self._below_advice = Adviser("looking for what is below the cache")
        self._prefixes, self._publisher = PrefixTeller(told.prefixes, gateways), publisher

    def tell_changes(self) -> None:
        self._below_advice.ask(self._clock.now(), self._told.look, None)
        self._prefixes.look()
        if self._publisher is not None:
            self._publisher.publish_news()


def open_publisher(told: ToldCache, assigned: Assigned) -> "KvEventPublisher | None":
    """What --kv-events asks for. Raises ConfigError where a library is missing."""
    engine = assigned.deployment.engine
    if told.events is None or (config := kv_events_of(engine.kv_events)) is None:
        return None
    try:
        from afserve.control.node.kv_events import KvEventPublisher
    except ImportError as error:
        raise ConfigError(f"--kv-events: {error}; type: pip install 'afserve[kv-events]'") from error
    return KvEventPublisher(config, told.events, assigned.node.index, engine.block_size)
