"""Which tokens run next: continuous batching with chunked prefill, prefix hits and preemption.

Integers in, integers out: no tensors, no clock, no sockets. Each micro-batch has its own running sequences;
all share one pool of blocks and one waiting queue. A plan's sequences are in flight until `commit`; only
sequences that are not in flight lose their blocks.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from math import inf
from types import MappingProxyType

from afserve.comm.kv.sharing import SharedPrompt
from afserve.config import EngineConfig
from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.told import ToldCache
from afserve.engine.scheduling.endings import extend, failed
from afserve.engine.scheduling.fair_share import FairShares, WaitingRequests
from afserve.engine.scheduling.giving_way import gives_way, steps_back
from afserve.engine.scheduling.guides import Guide
from afserve.engine.scheduling.open_requests import AHEAD_TOKENS, OpenRequests
from afserve.engine.scheduling.passes import passes_of
from afserve.engine.scheduling.prefix_hits import PrefixHits
from afserve.engine.scheduling.request import GenerationRequest
from afserve.engine.scheduling.request_limits import RequestLimits
from afserve.engine.scheduling.running import Running
from afserve.engine.scheduling.sequence import Sequence, turn_of
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.shared_prompts import SharedNews, leave, own_chunk, shared_of
from afserve.engine.scheduling.step_plan import DECODE, PROMPT, VERIFY, Chunk, Finished, StepPlan
from afserve.engine.scheduling.supposing import NOBODY, drafts_share, suppose_drafts
from afserve.engine.scheduling.turns import Turns
from afserve.errors import OverloadedError, RequestError
from afserve.tiles import EncoderSpec


class Scheduler:
    """`pool` is the node's; without one, for the scheduler alone, it makes its own. `reach`: how far tokens from one
    place to another can be computed, of a sequence with pictures."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        eos_ids: frozenset[int],
        pool: BlockPool | None = None,
        told: ToldCache | None = None,
        encoder: EncoderSpec | None = None,
        reach: Callable[[Sequence, int, int], int] = lambda _, start, end: end,
    ) -> None:
        self._config, self._eos_ids = config, eos_ids
        self.pool = pool or BlockPool(config.kv_blocks, config.block_size, caching=config.prefix_caching)
        self.blocks = SequenceBlocks(self.pool, told or ToldCache(self.pool))
        capacity = self.pool.blocks * self.pool.block_size
        self._limits = RequestLimits(config.max_model_len, capacity, vocab_size, encoder)
        self._shares = FairShares()
        self._waiting = WaitingRequests(self._shares)
        self._running, self._turns = Running(config.micro_batches), Turns()
        self.open = OpenRequests(self.pool.block_size)
        self._reach, self._order = reach, 0
        self.active = config.micro_batches
        self.step_tokens = self.prompt_tokens = config.max_batch_tokens  # at most, and of those
        self.preemptions = self.ahead_tokens = 0
        self.prefix = PrefixHits()
        self.shared_news: list[SharedNews] = []  # of the plans since somebody took them
        self.on_drop: Callable[[Sequence], object] = id  # told of each sequence that has ended

    # -- what may come in ------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        guide: Guide | None = None,
        arrived: float = 0.0,
        shared: SharedPrompt | None = None,
    ) -> None:
        """Queue a request, or raise RequestError or OverloadedError and change nothing. `guide` follows its grammar.
        Other nodes compute parts of a `shared` prompt."""
        if request.handle in self.open:
            raise RequestError(f"request {request.handle} is already running", param="handle")
        self._limits.check(request, self.open.tile_bytes if request.tiles else 0)
        eos = frozenset() if request.params.ignore_eos else self._eos_ids
        sequence = Sequence.start(request, self._order, eos, self.pool.root, guide)
        if not self._waiting.room(sequence, self._config.max_waiting):
            raise OverloadedError(
                f"{self.waiting} requests are waiting, the limit is {self._config.max_waiting}; try again later"
            )
        sequence.arrived, sequence.shared = arrived, shared
        lacks = len(sequence.tokens) - len(self.blocks.found(sequence)) * self.pool.block_size
        sequence.lacks = -(-lacks // shared.split.parts) if shared else lacks
        sequence.turn = self._turns.next(sequence.group, sequence.lacks, self.open.prompts_left())
        self._order += 1
        self.open.add(sequence)
        self._shares.opened(sequence)
        self._queue(sequence)

    def cancel(self, handle: int) -> bool:
        """Drop a request; `commit` drops one that is in flight. False if it is not known."""
        sequence = self.open.get(handle)
        if sequence is None:
            return False
        sequence.cancelled = True
        if not sequence.in_flight:
            self._drop(sequence)
        return True

    # -- what runs next --------------------------------------------------------------------------------

    def plan(self, micro_batch: int, now: float = inf, most_passes: int = 0) -> StepPlan | None:
        """The next step of one micro-batch, or None when it has nothing to run. Its chunks are in flight.

        Only the first `active` micro-batches take sequences; the others hand theirs over. With `most_passes` whoever
        runs the step can decode so many tokens of each sequence in it, which it does where nobody waits.
        """
        if self.open.gives_way:
            for one in [one for one in self._running if one.request.ahead and not one.in_flight]:
                self._step_back(one)
        self._running.even_out(micro_batch, self.active)
        if micro_batch < self.active:
            self._admit(micro_batch, now)
        if (drawn := self._running.drawing(micro_batch)) is not None:
            return drawn
        chunks: list[Chunk] = []
        budget, prompts, mine = self.step_tokens, self.prompt_tokens, self._running.by_batch[micro_batch]
        guessed, drafted = 0, NOBODY
        # Decodes first: one long prompt must not stall those who already read along.
        turn = self._shares.step_turn if self._shares.several else turn_of
        for sequence in sorted(mine, key=turn):
            if budget == 0:
                break
            if sequence.micro_batch != micro_batch:
                continue  # preempted by an earlier one of this loop
            if sequence.shared is not None and (shared := shared_of(sequence)) is not None:
                size, news = self.pool.block_size, self.shared_news
                own = own_chunk(sequence, shared, chunks, size, prompts, self._reserve, news)
                if own is not None:
                    self._shares.charge(sequence, own.start, own.count)
                    return StepPlan(micro_batch, (own,))
                continue
            start, known = sequence.computed, len(sequence.tokens)
            kind = PROMPT if start < sequence.given else DECODE if known - start == 1 else VERIFY
            if kind is not PROMPT:
                guessed += len(sequence.draft)
            elif guessed:
                prompts = min(prompts, budget - drafts_share(guessed, budget))
            most = min(budget, prompts) if kind is PROMPT else budget
            if sequence.request.ahead:
                most = min(most, AHEAD_TOKENS)
            if sequence.request.tiles:
                most = self._reach(sequence, start, min(known, start + most)) - start
            count = self._reserve(sequence, min(known - start, most)) if most else 0
            if count:
                sequence.in_flight = True
                chunks.append(Chunk(sequence, start, count, start + count >= known, kind))
                self._shares.charge(sequence, start, count)
                budget, prompts = budget - count, prompts - count * (kind is PROMPT)
        if guessed:
            self.blocks.spare(self._running.others(micro_batch), self.prompt_tokens)
            drafted = suppose_drafts(chunks, budget, self._limits.longest, self.blocks, self._shares)
        passes, alone = 0, self.running == len(mine)
        if most_passes and chunks and not drafted:
            waits = self.waiting or self.open.others_wait or self.open.moving or len(chunks) < self.running
            passes = passes_of(chunks, 1 if waits else most_passes, self._limits.longest, self.blocks)
        return StepPlan(micro_batch, tuple(chunks), drafted, alone=alone, passes=passes) if chunks else None

    def decoding(self, micro_batch: int) -> list[Sequence]:
        """Those that a draft may stand behind in their next step."""
        return [sequence for sequence in self._running.by_batch[micro_batch] if sequence.decodes]

    def has_work(self, micro_batch: int) -> bool:
        return bool(self._running.by_batch[micro_batch]) or bool(self._waiting)

    def _admit(self, micro_batch: int, now: float) -> None:
        """Move waiting sequences in, while there is room and this micro-batch has less than its share of all. Where all
        places are taken, one steps back whose turn is later. Of several tenants one that is ahead makes room, a
        sequence each time."""
        mine, asked = self._running.by_batch[micro_batch], False
        while self._waiting:
            if len(mine) >= -(-max(1, self.running + self.waiting) // self.active):
                return
            sequence = self._waiting.first()
            if sequence is None or (sequence.request.ahead and (self.running or self.open.holds_ahead(now))):
                return
            if self._enters(sequence, micro_batch):
                continue
            leaves = None if asked else gives_way(self._shares, sequence, self._running)
            if leaves is None:
                return
            asked = True
            self._preempt(leaves)

    def _enters(self, sequence: Sequence, micro_batch: int) -> bool:
        later = None
        if self.running >= self._config.max_sequences:
            later = steps_back(sequence, self._running)
            if later is None:
                return False
        found = self.blocks.room_to_enter(sequence, self.prompt_tokens, self.running)
        if found is None:
            return False
        if later is not None:
            self._step_back(later)
        self._waiting.remove(sequence)
        self._enter(sequence, micro_batch, found)
        return True

    def _enter(self, sequence: Sequence, micro_batch: int, found: list[int]) -> None:
        self.blocks.hold(sequence, found)
        if not sequence.started:
            sequence.started = True
            most = sequence.request.cached_most
            sequence.cached_tokens = sequence.computed if most is None else min(sequence.computed, most)
            restored = self.pool.take_restored(found)
            self.prefix.count(sequence, {t: n * self.pool.block_size for t, n in restored.items()})
        self._running.enter(sequence, micro_batch)

    def _reserve(self, sequence: Sequence, count: int) -> int:
        """Blocks for `count` more tokens, preempting later sequences if need be; how many tokens have room."""
        while not self.blocks.grow(sequence, count):
            if (victim := self._running.youngest_behind(sequence)) is not None:
                self._preempt(victim)
            elif (room := self.blocks.room(sequence)) > 0:
                count = min(count, room)
            elif any(s.in_flight for s in self._running):
                return 0  # others will finish or grow past it; try again next step
            else:
                self._preempt(sequence)
                return 0
        return count

    def _step_back(self, sequence: Sequence) -> None:
        """To the queue. What it has computed can be found."""
        self._leave(sequence)
        sequence.computed = 0
        sequence.keys.clear()
        self._waiting.add(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, where it keeps its turn; its tokens are kept and computed again (recomputation)."""
        self._leave(sequence)
        leave(sequence, "a node had no room to keep its part", self.shared_news)
        if sequence.collects_prompt:
            sequence.prompt_logprobs.clear()
        left = sequence.prompt_left
        sequence.counted, sequence.computed = max(sequence.counted, sequence.computed), 0
        sequence.keys.clear()
        sequence.draft.clear()
        sequence.given = sequence.lacks = len(sequence.tokens)
        self._turns.again(sequence.group, sequence.lacks - left)
        sequence.preemptions += 1
        self.preemptions += 1
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        self._shares.needs(sequence)
        self._waiting.add(sequence)

    # -- what came back --------------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, accepted: Many[Many[int]], failures: Mapping[int, str] = MappingProxyType({})
    ) -> list[Finished]:
        """Book a step that ran. `accepted` has a run of tokens, usually one, for each chunk that was `last` and did not
        fail, in order; a run is cut behind the token that ends its sequence.

        The last token of a run is still to be computed, and so is whatever a chunk did not reach. `failures` says why a
        chunk gave nothing, by its index in the plan: its sequence ends, and what it wrote is never found by others.
        """
        finished: list[Finished] = []
        runs = iter(accepted)
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            sequence.in_flight = False
            sequence.draft.clear()
            if plan.draws:
                self._running.drawn(sequence)
            if index in failures:
                finished.append(failed(sequence, failures[index], self.blocks.unwritten(sequence)))
                continue
            run = next(runs) if chunk.last else ()
            known, ended = len(sequence.tokens), None
            self.ahead_tokens += chunk.count * sequence.request.ahead
            if sequence.cancelled:
                ended = Finished(sequence, "cancelled")
            elif run:
                ended = extend(sequence, run, self._limits.longest)
                known = len(sequence.tokens) - 1  # what the chunk supposed beyond this was not accepted
            end = chunk.start + (len(run) if plan.passes else chunk.count)
            if plan.passes > 1:
                self._shares.charge(sequence, chunk.start + chunk.count, len(run) - chunk.count)
            before, sequence.computed = sequence.computed, min(end, known)
            if sequence.computed >= sequence.given:
                self._shares.met(sequence)
            self.blocks.computed(sequence, before)
            if ended is not None:
                finished.append(ended)
        for done in finished:
            self._drop(done.sequence)
        return finished

    def abandon(self, plan: StepPlan, *, moved: bool = False) -> list[Finished]:
        """A step that ended in the middle: nothing of it was computed. A recurrent state of what was computed ahead may
        have moved on, others have where it was `moved`: they begin again behind their last whole block."""
        for chunk in plan.chunks:
            chunk.sequence.in_flight = False
            if (plan.ahead or moved) and not chunk.sequence.cancelled:
                (self._step_back if plan.ahead else self._preempt)(chunk.sequence)
        cancelled = [Finished(c.sequence, "cancelled") for c in plan.chunks if c.sequence.cancelled]
        for done in cancelled:
            self._drop(done.sequence)
        return cancelled

    def _leave(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self._running.leave(sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence.micro_batch >= 0:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        self.open.remove(sequence)
        self._shares.closed(sequence)
        self.on_drop(sequence)

    # -- what others may know --------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) - self._waiting.ahead

    @property
    def busy(self) -> bool:
        return bool(self.open)

    @property
    def shares(self) -> bool:
        """Whether other nodes compute parts of any running prompt."""
        return any(s.shared is not None for s in self._running)

    def check(self, held: Iterable[int] = ()) -> None:
        """Integrity of blocks and queues; for tests and debugging. `held` are blocks that others hold."""
        self.blocks.check(list(self._running), held)
        self._running.check()
        assert len(self.open) == self.running + len(self._waiting), "a request is in no queue, or in two"
        self._shares.check(list(self.open.values()))
