"""Requests that bring their KV along: a node that goes on with one pulls its blocks before it is scheduled.

It is pulled where that is predicted to be faster than to compute the tokens again, by rates measured here, and for no
longer than that would take. Whatever does not come in time is computed. Prompts that prefill nodes compute come the
same way (`hand_over.py`), as do those that this node computes for others (`prefilling.py`). It knows no streams.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from afserve.clock import Clock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Name
from afserve.comm.kv.puller import Instead, Pulled
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.moving.copying import Copier
from afserve.engine.kv.moving.hand_over import HandOvers
from afserve.engine.kv.moving.handing_on import HandingOn
from afserve.engine.kv.moving.jobs import LEAST_SECONDS, Job, Jobs, TurnTime, limit_of
from afserve.engine.kv.moving.lending import LentBelow
from afserve.engine.kv.moving.prefilling import Prefilling
from afserve.engine.kv.moving.restoring import Restore, Restores
from afserve.engine.kv.tiers import KvTiers
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.engine.stats import KvStats, TierStats, smoothed
from afserve.tracing.trace import KV_BLOCKS

MOST_PULLS = 8  # at once: each may have a window of bytes under way
_START_SECONDS = 0.002  # of a pull, whatever its size
_WEIGHT = 0.3  # of the newest pull in the measured rate
_PATIENCE = 0.02  # seconds: a core may be away for so long
_AGAIN = 1.5  # who was too slow is tried again: with each refusal it is thought faster by so much
_MOST_RATES = 1024  # nodes whose rates are remembered


@dataclass(frozen=True, slots=True)
class _Pull(Job):
    source: KvSource
    names: list[Name]
    instead: Instead | None  # where the time of computing was measured


class KvMoves:
    """Requests that wait for blocks go in, those that wait no more come out.

    `copier` is there with `--kv-copies`; `tell` takes lines for the run's log. Prompts of at most `straight` tokens
    are not handed over where they are predicted to be computed here sooner, and at most `waiting` requests wait for
    room, or for `tiers` below the cache. `warn` takes lines too."""

    def __init__(
        self,
        node: AttentionNode[Any],
        exchange: Exchange,
        clock: Clock,
        block_size: int,
        block_bytes: int,
        copier: Copier | None = None,
        tell: Callable[[str], None] = lambda line: None,
        straight: int = 0,
        waiting: int = 1024,
        tiers: KvTiers | None = None,
        warn: Callable[[str], None] = lambda line: None,
        handing_on: HandingOn | None = None,
    ) -> None:
        self._node, self._exchange, self._clock = node, exchange, clock
        self._block_size, self._block_bytes = block_size, block_bytes
        self._copier, self._tell, self._handing_on = copier, tell, handing_on
        self._restores = Restores(tiers, node, clock, block_size, block_bytes, warn, waiting)
        self._lent_below = LentBelow(exchange, self._restores)
        self._prefilling = Prefilling(node, exchange, clock, block_size, self._limit, self._restores)
        self._handing = HandOvers(node, exchange, clock, block_size, straight, tell, waiting)
        self._pulls = Jobs[_Pull](exchange.cancel)
        self._rates: dict[str, float] = {}  # bytes per second of the pulls so far, by whose address
        self._rate = 0.0  # the same of all that came, for who was not asked yet
        self._time = TurnTime(clock.now())
        self._done = self._failed = self._recomputed = 0
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether `turn` has to be called several times a second."""
        return bool(self._pulls or self._handing.busy or self._exchange.busy or self._restores.busy)

    @property
    def eager(self) -> bool:
        """Whether `turn` has something to do at once."""
        return self._exchange.eager

    @property
    def holding(self) -> bool:
        """Whether this node must stay, for others still pull its blocks."""
        return self._exchange.lending

    def pull(self, request: GenerationRequest, source: KvSource) -> bool:
        """Whether the request waits for its blocks; `turn` returns it. Another node that is to compute the prompt is
        asked for what the tiers have not."""
        return (source.prefills and self._restores.restore(request, source)) or self._ask(request, source)

    def _ask(self, request: GenerationRequest, source: KvSource) -> bool:
        if source.prefills:
            return self._handing.ask(request, source, lambda blocks: self._predict(blocks, source.address)[0])
        names = self._node.usable_names(request)
        if not (names and source.address):
            return False
        transfer, again = self._predict(len(names), source.address)
        limit = self._limit(len(names), source.address)
        tokens, megabytes = len(names) * self._block_size, len(names) * self._block_bytes / 1e6
        owner = source.life.node
        self._tell(
            f"request {request.handle} comes from {owner} with {tokens:,} tokens: moving their KV "
            f"({megabytes:,.1f} MB) takes {_told(transfer)}, computing them {_told(again)}; "
            f"they are {'moved' if limit else 'computed'}"
        )
        if limit:
            self._pulls.queue.append(
                _Pull(request, self._clock.now(), limit, source, names, _instead(transfer, again))
            )
        elif source.address in self._rates:
            self._rates[source.address] *= _AGAIN
        return limit > 0

    def restore(self, request: GenerationRequest) -> bool:
        """Whether the request, which nobody has blocks for, waits for those below the cache; `turn` returns it."""
        return self._restores.restore(request)

    def _predict(self, blocks: int, address: str = "") -> tuple[float, float]:
        """Seconds to move so many blocks, from there where that is said, and to compute them; 0 for what was not
        measured yet."""
        moved = self._rates.get(address, self._rate)
        transfer = _START_SECONDS + blocks * self._block_bytes / moved if moved else 0.0
        rate = self._node.prefill_rate
        return transfer, blocks * self._block_size / rate if rate else 0.0

    def _limit(self, blocks: int, address: str = "") -> float:
        """Seconds that so many may take to come; 0 where they are predicted to be computed sooner."""
        transfer, again = self._predict(blocks, address)
        worth = not (transfer and again) or transfer < again
        return limit_of(again) if worth else 0.0

    def part(self, number: int) -> None:
        """This request goes on elsewhere, and may ask for its blocks."""
        self._exchange.part(number, self._node.written_names_of(number))

    def computed(self, event: TokenEvent) -> None:
        """An event of what is computed here for another node."""
        self._prefilling.ended(event)

    def cancel(self, number: int) -> None:
        """May be said of any request."""
        self._handing.cancel(number)
        self._pulls.forget_request(number)
        self._restores.cancel(number)

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        """These nodes keep copies of what is computed here from now on."""
        if self._copier is not None:
            self._copier.copy_to(peers)

    def hands_on(self, peers: Sequence[SplitMember]) -> bool:
        """Whether what this node has still goes to others before it leaves; the first call begins with that."""
        return self._handing_on is not None and self._handing_on.go_on(peers)

    def turn(self) -> list[GenerationRequest]:
        """Once per turn of the loop; requests that wait no more."""
        now = self._clock.now()
        if self._copier is not None:
            self._copier.turn()
        self._prefilling.lend()
        ready = self._start_pulls(now) if self._pulls.queue else []
        ready += self._handing.start()
        busy = self._node.busy
        seconds = self._time.seconds(now, busy=busy)
        self._exchange.turn(seconds, lingers=not busy)
        self._prefilling.take()
        self._lent_below.turn()
        for pulled in self._exchange.ended:
            if pulls := self._pulls.take_waiting(pulled.transfer):
                self._note(pulls[0], pulled)
                ready.append(replace(pulls[0].request, from_peer=pulled.received * self._block_size))
            elif self._prefilling.fetched(pulled):
                self._measure(pulled)
            elif (request := self._handing.ended(pulled)) is not None:
                ready.append(request)
        self._exchange.ended.clear()
        for offer, kept in self._exchange.settled:
            if self._copier is not None:
                self._copier.settled(offer, kept)
            if self._handing_on is not None:
                self._handing_on.settled(offer, kept)
        self._exchange.settled.clear()
        # What was pulled from another node may go on here: its beginning may be in a tier.
        ready = [request for request in ready if not self._restores.restore(request)]
        for job in self._restores.turn(seconds):
            ready += self._go_on(job)
        return ready

    def _go_on(self, job: Restore) -> list[GenerationRequest]:
        """The request, where it waits for nothing more."""
        if job.request.wants_row:
            self._prefilling.go_on(job.request)
            return []
        waits = job.source is not None and self._ask(job.request, job.source)
        return [] if waits else [job.request]

    def _start_pulls(self, now: float) -> list[GenerationRequest]:
        """Those that have waited too long for their turn are computed."""
        late = self._pulls.take_late(now)
        self._failed += len(late)
        self._recomputed += sum(len(one.names) for one in late) * self._block_size
        for one in self._pulls.queue[: MOST_PULLS - self._pulls.running]:
            source = one.source
            transfer = self._exchange.pull(
                source.address,
                one.names,
                one.left(now),
                request=source.request,
                generation=source.life.generation,
                instead=one.instead,
            )
            self._pulls.wait_for(one, transfer)
        return [one.request for one in late]

    def _note(self, waited: _Pull, pulled: Pulled) -> None:
        self._done += 1
        self._seconds += pulled.seconds
        missing = len(waited.names) - pulled.here - pulled.received
        if not pulled.complete:
            self._failed += 1
            self._recomputed += missing * self._block_size
        self._measure(pulled, waited.source.address)
        owner = waited.source.life.node
        self._tell(
            f"request {waited.request.handle}: {pulled.received} of {len(waited.names)} blocks came from {owner} in "
            f"{1e3 * pulled.seconds:.1f} ms, {pulled.here} were here, {missing} are computed again ({pulled.why})"
        )
        what = f"{pulled.received} blocks from {owner}"
        self._node.draw(KV_BLOCKS, what, pulled.seconds)

    def _measure(self, pulled: Pulled, address: str = "") -> None:
        """Of one that was waited for in vain it is as if a block had come."""
        if pulled.bytes and pulled.seconds > 0:
            self._rate = smoothed(self._rate, pulled.bytes / pulled.seconds, _WEIGHT)
        if address and (pulled.seconds >= LEAST_SECONDS or (pulled.bytes and pulled.seconds > 0)):
            rate = max(pulled.bytes, self._block_bytes) / pulled.seconds
            known = self._rates.pop(address, 0.0)
            self._rates[address] = smoothed(known, rate, _WEIGHT)
            if len(self._rates) > _MOST_RATES:
                del self._rates[next(iter(self._rates))]

    def stats(self) -> KvStats:
        moved = self._exchange.stats()
        return KvStats(
            bytes_sent=moved.bytes_sent,
            bytes_received=moved.bytes_received,
            leased=moved.leased,
            lapsed=moved.lapsed,
            pulls=self._done,
            pulls_failed=self._failed,
            pull_seconds=self._seconds,
            recomputed_tokens=self._recomputed,
            copied_blocks=0 if self._copier is None else self._copier.blocks,
            handed=self._handing.handed,
            handed_short=self._handing.short,
            hand_seconds=self._handing.seconds,
            straight=self._handing.went_straight,
            prompts=self._prefilling.prompts,
            split=self._prefilling.parts.split,
            split_short=self._prefilling.parts.short,
            parts=self._prefilling.parts.helped,
            lent_below=self._lent_below.chains,
            oldest_lease=moved.oldest,
        )

    @property
    def in_line(self) -> int:
        """Requests that wait for room in the cache."""
        return self._restores.in_line

    def tiers(self) -> TierStats:
        return self._restores.stats()

    def close(self) -> None:
        self._exchange.close()
        self._restores.close()


def _instead(transfer: float, again: float) -> Instead | None:
    """A link is judged after a tenth of the time of computing, or three times that in which all should have come."""
    return Instead(again, max(_PATIENCE, again / 10, 3 * transfer)) if again else None


def _told(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds else "a time not measured yet"
