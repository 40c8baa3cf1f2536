"""Prompts that this node computes together with other prefill nodes: as the lead, whom a decode node has asked, or as
one that the lead has asked.

The lead waits until all have joined, half a second at most, and computes alone where they do not. Whoever has a part
first gets what the lead has in its cache. When it is over before its end, the lead computes what is missing, and the
others stop. It knows no decode nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from afserve.clock import Clock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.puller import Pulled
from afserve.comm.kv.sharing import JOIN_SECONDS, SharedPrompt
from afserve.comm.kv.split import LEAD, SplitMember, split_over
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.moving.jobs import Job, Jobs
from afserve.engine.scheduling.request import GenerationRequest, Purpose
from afserve.errors import AfserveError
from afserve.tracing.trace import KV_BLOCKS

_FETCH_SECONDS = 5.0  # of what the lead has in its cache
Begun = tuple[GenerationRequest, SharedPrompt | None]


@dataclass(frozen=True, slots=True)
class _Part(Job):
    shared: SharedPrompt


class Parts:
    """`split` prompts this node led, and `short` ones of those were over before their end; it `helped` with others.
    `asked` makes a request of a prompt, with a number of its own."""

    def __init__(
        self,
        node: AttentionNode[Any],
        exchange: Exchange,
        clock: Clock,
        block_size: int,
        asked: Callable[[Prefill, Purpose], GenerationRequest],
    ) -> None:
        self._node, self._exchange, self._clock = node, exchange, clock
        self._block_size, self._asked = block_size, asked
        self._parts: dict[int, _Part] = {}  # by handle
        self._joining = Jobs[_Part]()  # until all have, by group
        self._fetching = Jobs[_Part](exchange.cancel)
        self.split = self.short = self.helped = 0

    def propose(self, request: GenerationRequest, prefill: Prefill, members: tuple[SplitMember, ...]) -> bool:
        """Whether the request waits for these nodes, of which this is the first; `take` returns it."""
        start = self._node.known(self._node.usable_names(request)) * self._block_size
        most = self._node.chunk_tokens
        split = split_over(len(prefill.tokens), start, len(members), most, self._block_size)
        if split is None or not self._exchange.sharing.room:
            return False
        shared = self._exchange.propose(split, members, prefill)
        part = self._parts[request.handle] = _Part(request, self._clock.now(), JOIN_SECONDS, shared)
        self._joining.wait_for(part, shared.group)
        self.split += 1
        return True

    def take(self) -> list[Begun]:
        """Requests to begin with, alone where there is nobody else."""
        sharing, begun = self._exchange.sharing, list[Begun]()
        started, sharing.started = sharing.started, []
        for shared in started:
            if shared.over and not shared.leads:
                continue  # said in the same turn
            parts = self._joining.take_waiting(shared.group) if shared.leads else self._joined(shared)
            begun += ((part.request, shared) for part in parts)
        ended, sharing.ended = sharing.ended, []
        for shared in ended:
            if shared.leads:
                begun += ((part.request, None) for part in self._joining.take_waiting(shared.group))
            else:
                self._stop(shared)
        return begun

    def _joined(self, shared: SharedPrompt) -> list[_Part]:
        """Its part; none where it has to wait for what the lead has, or cannot take one."""
        split = shared.split
        try:
            request = self._asked(shared.prefill, Purpose.PART)
        except AfserveError as error:
            shared.leave(error.message)
            return []
        part = self._parts[request.handle] = _Part(request, self._clock.now(), _FETCH_SECONDS, shared)
        self.helped += 1
        if split.start % self._block_size or split.chunk % self._block_size:
            shared.leave(f"blocks have {self._block_size} tokens here")
            return []
        names = self._node.usable_names(request)[: split.start // self._block_size]
        if self._node.known(names) == len(names):
            return [part]
        lead = shared.members[LEAD]
        transfer = self._exchange.pull(lead.address, names, part.limit, request=0, generation=lead.generation)
        self._fetching.wait_for(part, transfer)
        return []

    def fetched(self, pulled: Pulled) -> Begun | None:
        """What the lead had is here, as far as it came; the rest this node computes too."""
        parts = self._fetching.take_waiting(pulled.transfer)
        return (parts[0].request, parts[0].shared) if parts else None

    def ended(self, handle: int, error: str | None) -> None:
        """May be said of any request."""
        if (part := self._parts.pop(handle, None)) is None:
            return
        shared = part.shared
        if error is not None:
            shared.leave(error)
        self.short += shared.leads and bool(shared.over)
        self._exchange.sharing.close(shared)
        what = f"part {shared.split.mine + 1} of {shared.split.parts} of the prompt of request {shared.prefill.request}"
        self._node.draw(KV_BLOCKS, what, self._clock.now() - part.since)

    def cancel(self, handle: int) -> None:
        """Nobody waits for it. May be said of any request."""
        if (part := self._parts.pop(handle, None)) is not None:
            self._joining.forget_request(handle)
            part.shared.leave("nobody waits for it any more")
            self._exchange.sharing.close(part.shared)

    def _stop(self, shared: SharedPrompt) -> None:
        for handle in [handle for handle, part in self._parts.items() if part.shared is shared]:
            self._fetching.forget_request(handle)
            self._node.cancel(handle)
            self.ended(handle, None)
