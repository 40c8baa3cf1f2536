"""The decode side of a hand-over: a prefill node computes the prompt, and its blocks come here while it does.

The request is scheduled here once the last block is there, with all of its prompt but the end in the prefix cache, and
with the row that its first token is drawn from: the end of the prompt is computed together with that token.
Whatever did not come is computed here: a lost prefill node, a wrong checksum and a refusal cost time and no token.
Calls come from the thread that steps the node.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from afserve.clock import Clock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Name
from afserve.comm.kv.puller import Prompt, Pulled
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.moving.jobs import Job, Jobs
from afserve.engine.kv.moving.prompt_place import PromptQueue, SplitPrompt, goes_straight, parts_of
from afserve.engine.scheduling.request import GenerationRequest
from afserve.engine.scheduling.turns import Group, Turns
from afserve.tracing.trace import KV_BLOCKS

MOST_AT_ONCE = 64
_BYTES_PER_SECOND = 1e9  # of KV where none was moved yet; tcp on two cores has 1.4e9 and more (bench/LOG.md)
HAND_OVER_SECONDS = 60.0  # the prefill node says that it still computes; longer, and it is computed here


@dataclass(frozen=True, slots=True)
class _HandOver(Job):
    source: KvSource
    names: list[Name]
    missing: int  # blocks, when it was asked for
    turn: int
    tokens: int  # that were not here then
    transfer: float  # seconds that the blocks take, as predicted; 0 where that is not known

    @property
    def group(self) -> Group:
        return self.request.tenant.name, self.request.priority


class HandOvers:
    """`straight` tokens are the most that are ever computed here because that is predicted to be faster; `waiting` is
    how many may wait for room, more are the scheduler's to take or to refuse. Counts: `handed` over, `short` ones of
    those, `seconds` they took, and requests that `went_straight`."""

    def __init__(
        self,
        node: AttentionNode[Any],
        exchange: Exchange,
        clock: Clock,
        block_size: int,
        straight: int,
        tell: Callable[[str], None],
        waiting: int = 1024,
    ) -> None:
        self._waiting = waiting
        self._node, self._exchange, self._clock = node, exchange, clock
        self._block_size, self._straight, self._tell = block_size, straight, tell
        self._jobs = Jobs[_HandOver](exchange.cancel)
        self._turns = Turns()
        self.handed = self.short = self.went_straight = 0
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def ask(self, request: GenerationRequest, source: KvSource, transfer: Callable[[int], float]) -> bool:
        """Whether the request waits for its prompt from the prefill node `source`. `transfer` gives the seconds that so
        many blocks take."""
        names = self._node.usable_names(request)
        missing = len(names) - self._node.known(names)
        if not missing or len(names) > self._node.most_room or len(self._jobs.queue) >= self._waiting:
            return False
        now = self._clock.now()
        there = self._queue_at(source.address, now)
        here = PromptQueue(self._node.queued_tokens, self._node.prompt_rate)
        tokens = len(request.prompt_ids) + len(request.generated)
        tokens -= (len(names) - missing) * self._block_size
        seconds = transfer(missing)
        if goes_straight(tokens, self._straight, here, there, seconds):
            self.went_straight += 1
            return False
        others = ((one.group, one.tokens) for one in (*self._jobs.queue, *self._jobs.under_way))
        turn = self._turns.next((request.tenant.name, request.priority), tokens, others)
        self._jobs.queue.append(
            _HandOver(request, now, HAND_OVER_SECONDS, source, names, missing, turn, tokens, seconds)
        )
        return True

    def _queue_at(self, address: str, now: float) -> PromptQueue | None:
        load = self._exchange.load(address)
        return None if load is None else PromptQueue(load.queued_at(now), load.rate)

    def _members(self, one: _HandOver, now: float) -> tuple[SplitMember, ...]:
        """The prefill nodes that compute it together; none where the one that is asked does alone, as with pictures."""
        source = one.source
        if source.within is None or not source.helpers or one.request.tiles:
            return ()
        nodes = (SplitMember(source.life.generation, source.address), *source.helpers)
        queues = [self._queue_at(node.address, now) or PromptQueue(0.0, 0.0) for node in nodes]
        transfer = one.transfer or one.missing * self._node.block_bytes / _BYTES_PER_SECOND
        prompt = SplitPrompt(one.tokens, self._node.chunk_tokens, self._node.layers, transfer)
        parts = parts_of(prompt, source.within - (now - one.since), queues)
        if parts == 1:
            return ()
        self._tell(
            f"request {one.request.handle}: {parts} prefill nodes compute its {one.tokens:,} tokens together; "
            f"one alone would be later than the {source.within:.2f} s that were asked for"
        )
        return nodes[:parts]

    def cancel(self, number: int) -> None:
        """May be said of any request."""
        self._jobs.forget_request(number)

    def start(self) -> list[GenerationRequest]:
        """Begin those that there is room for, in turn; the requests that have waited too long for it."""
        now = self._clock.now()
        late = self._jobs.take_late(now)
        while self._jobs.queue and self._jobs.running < MOST_AT_ONCE:
            one = self._first()
            if not self._node.has_room(one.names):
                break
            self._jobs.wait_for(one, self._ask(one, now))
        self.handed += len(late)
        self.short += len(late)
        return [one.request for one in late]

    def _first(self) -> _HandOver:
        """By priority, then of the tenant that has the fewest blocks under way for its share, then by turn."""
        blocks: Counter[str] = Counter()
        for one in self._jobs.under_way:
            blocks[one.request.tenant.name] += one.missing

        def turn(one: _HandOver) -> tuple[int, float, int]:
            tenant = one.request.tenant
            return one.request.priority, blocks[tenant.name] / tenant.share, one.turn

        return min(self._jobs.queue, key=turn)

    def ended(self, pulled: Pulled) -> GenerationRequest | None:
        """The request that it was for, if that is still wanted: what was computed for it counts as not cached."""
        ended = self._jobs.take_waiting(pulled.transfer)
        if not ended:
            return None
        one = ended[0]
        now = self._clock.now()
        self.handed += 1
        self.short += not pulled.complete
        self.seconds += now - one.since
        owner, total = one.source.life.node, len(one.names)
        missing = total - pulled.here - pulled.received
        self._tell(
            f"request {one.request.handle}: {owner} computed {pulled.received} of {total} blocks in "
            f"{1e3 * (now - one.since):.1f} ms, {pulled.here} were here, {missing} are computed here ({pulled.why})"
        )
        if pulled.received:
            self._node.draw_arrow(KV_BLOCKS, f"prompt {one.request.handle}", "f")
        self._node.draw(KV_BLOCKS, f"{pulled.received} blocks from {owner}", now - one.since)
        row = bytes(pulled.row) if len(pulled.row) == self._node.row_bytes else b""
        here, peer = pulled.here * self._block_size, pulled.known * self._block_size
        return replace(one.request, cached_most=here + peer, from_peer=peer, row=row)

    def _ask(self, one: _HandOver, now: float) -> int:
        """The prefill node for the prompt; the transfer's number."""
        request, source = one.request, one.source
        tokens = (*request.prompt_ids, *request.generated)
        tenant, tail = request.tenant, len(tokens) - len(one.names) * self._block_size
        asked = request.priority, request.cache_salt, tenant.name, tenant.share
        prompt = Prompt(tokens, request.handle, *asked, tail=tail, tiles=request.tiles)
        return self._exchange.pull(
            source.address,
            one.names,
            one.left(now),
            request=0,
            generation=source.life.generation,
            prompt=prompt,
            members=self._members(one, now),
        )
