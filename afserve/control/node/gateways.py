"""An attention node's streams to the gateways, dialled from here, since nodes listen nowhere, and again when they end.

Which gateways there are is told by the controller. What arrives is delivered to the node's one inbox, with the gateway
and the life of the stream that it came by, so that nothing of an earlier stream is taken for the present one's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc

from afserve.clock import Clock, MonotonicClock
from afserve.control.node.stream import ATTEND, Stream
from afserve.control.wire.request_values import Attend, FromAttention, ToAttention
from afserve.control.wire.values import Gateways
from afserve.tls import Certificates, CertifiedRole

_AGAIN_SECONDS = 0.5  # between two attempts to reach a gateway


@dataclass(frozen=True, slots=True)
class FromGateway:
    """`value` None: this stream has ended."""

    gateway: int
    life: int
    value: ToAttention | None


class GatewayStreams:
    """All calls but `deliver` come from the node's own thread. `home` is the controller's address.

    `attend` makes the first message of a stream to a gateway.
    """

    def __init__(
        self,
        attend: Callable[[int], Attend],
        home: str,
        token: str,
        deliver: Callable[[FromGateway], None],
        clock: Clock | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._attend, self._home, self._token, self._deliver = attend, home, token, deliver
        self._clock = clock or MonotonicClock()
        self._wanted: dict[int, str] = {}
        self._streams: dict[int, tuple[int, Stream[FromAttention, ToAttention]]] = {}
        self._again: dict[int, float] = {}
        self._dialled: dict[int, float] = {}
        self._lives = 0

    def update(self, value: Gateways) -> list[int]:
        """From now on these are the gateways, called by the next `redial`; returns those that were left."""
        wanted = {index: address or self._home for index, address in value.gateways}
        left = [index for index, address in self._wanted.items() if wanted.get(index) != address]
        self._wanted = wanted
        for index in left:
            self._close(index)
        for index in wanted:
            if index not in self._streams:
                self._again.setdefault(index, self._clock.now())
        return left

    def lives(self) -> dict[int, int]:
        """Of the streams, by gateway."""
        return {gateway: life for gateway, (life, _) in self._streams.items()}

    def is_of_now(self, value: FromGateway) -> bool:
        life, _ = self._streams.get(value.gateway, (None, None))
        return life == value.life

    def lost(self, gateway: int) -> None:
        """Its stream has ended; `redial` tries again, at once where the last attempt was long ago."""
        self._close(gateway)
        if gateway in self._wanted:
            self._again[gateway] = max(self._clock.now(), self._dialled[gateway] + _AGAIN_SECONDS)

    @property
    def waiting(self) -> bool:
        """Whether `redial` has something to do soon."""
        return bool(self._again)

    def redial(self) -> None:
        """Called once per turn of the loop; does something only where a stream is missing."""
        if self._again:
            now = self._clock.now()
            for gateway in [gateway for gateway, at in self._again.items() if now >= at]:
                self._dial(gateway)

    def send(self, gateway: int, value: FromAttention) -> None:
        """To a gateway that has gone, nothing: it is told when it is back."""
        if (found := self._streams.get(gateway)) is not None:
            found[1].send(value)

    def close(self) -> None:
        """What was sent goes out first."""
        for _, stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _dial(self, gateway: int) -> None:
        self._again.pop(gateway, None)
        self._dialled[gateway] = self._clock.now()
        self._lives += 1
        life, deliver = self._lives, self._deliver

        def ended(error: grpc.RpcError | None) -> None:
            deliver(FromGateway(gateway, life, None))

        def arrived(value: ToAttention) -> None:
            deliver(FromGateway(gateway, life, value))

        address = self._wanted[gateway]
        role = CertifiedRole.CONTROLLER if address == self._home else CertifiedRole.GATEWAY
        stream = Stream(address, self._token, ATTEND, arrived, ended, self._certificates, role)
        self._streams[gateway] = life, stream
        stream.send(replace(self._attend(gateway), stream=life))
        stream.start()

    def _close(self, gateway: int) -> None:
        self._again.pop(gateway, None)
        if (found := self._streams.pop(gateway, None)) is not None:
            found[1].drop()
