"""A small model beside the served one, over a KV cache of its own: it reads texts and says what may follow them.

A text is a `Sequence` that nobody else runs. Whatever becomes of a request on its node, its text begins anew with what
this cache knows of it, and is read on in pieces: nothing of it is moved, handed over or kept elsewhere. Shapes: S texts
whose next token is wanted, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from torch import Tensor

from afserve.clock import MonotonicClock
from afserve.comm.m2n.bank import Bank, LocalBankLink, LocalTicket
from afserve.config import EngineConfig
from afserve.drafts import NO_GUESS, Guess
from afserve.engine.kv.cache import KvCache
from afserve.engine.kv.told import ToldCache
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import DECODE, PROMPT, Chunk, StepPlan
from afserve.engine.step.choose import choose_runners
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.meter import Meter
from afserve.engine.step.runner import StepRun
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import build_step
from afserve.kernels.devices.opened import device_of
from afserve.models.decoder import AttentionModel

PIECE = 512  # tokens of texts that are read behind one step at most
_PARAMS = SamplingParams(max_tokens=1)


@dataclass(slots=True)
class Text:
    """`sequence.computed` tokens of it are known to be right and in the cache; behind them stand others that were
    guessed, of which `read` in all are in the cache too."""

    sequence: Sequence
    read: int = 0
    lost: bool = False  # a number in it was not finite, or a token is none of this model's


class DraftModel:
    """Its experts, if it has any, are in this process, and so nobody is waited for."""

    def __init__(self, model: AttentionModel, bank: Bank, config: EngineConfig) -> None:
        """`config` is the node's: the cache has as many tokens as the node's own."""
        one = replace(config, micro_batches=1, draft="off", speculative_config="")
        own = replace(one, window_blocks=0, kv_near_rows=0, kv_events="")
        self._model, self._piece = model, min(PIECE, own.most_rows)
        self.longest = min(config.max_model_len, model.spec.max_position)
        self._kv = KvCache(model, own)
        told = ToldCache(self._kv.pool)
        self._kv.on_forgotten = told.gone
        self.blocks = SequenceBlocks(self._kv.pool, told)
        experts = model.spec.choices if model.spec.moe_layers else 1
        load = ExpertLoad(model.spec.moe_layers, experts, 1, model.ops.device)  # nobody reads it
        meter = Meter(MonotonicClock())
        (self._runner,) = choose_runners(model, self._kv, LocalBankLink(bank), load, meter, own)
        self._buffers = StepBuffers(device_of(model.ops.device), config.max_model_len)
        self._texts: OrderedDict[int, Text] = (
            OrderedDict()
        )  # by order; the one that was used last stands last

    def text_of(self, sequence: Sequence, known: Many[int]) -> Text | None:
        """The text of a running sequence, whose tokens are `known` now; what was guessed of it otherwise is forgotten.
        None where this model has no such texts."""
        text = self._texts.get(sequence.order)
        if text is None:
            text = self._texts[sequence.order] = self._begin(sequence, known)
        elif not text.lost:
            self._correct(text, known)
        self._texts.move_to_end(sequence.order)
        return None if text.lost or len(known) > self.longest else text

    def _begin(self, sequence: Sequence, known: Many[int]) -> Text:
        request = GenerationRequest(sequence.order, (), _PARAMS, cache_salt=sequence.request.cache_salt)
        text = Text(Sequence.start(request, sequence.order, frozenset(), self._kv.pool.root))
        self._add(text, known)
        if not text.lost:
            self.blocks.hold(text.sequence, self.blocks.found(text.sequence))
            text.read = text.sequence.computed
        return text

    def _correct(self, text: Text, known: Many[int]) -> None:
        own, at = text.sequence, text.sequence.computed
        while at < min(text.read, len(known)) and own.tokens[at] == known[at]:
            at += 1
        del own.tokens[at:]
        self._add(text, known[at:])
        text.read = at
        self._note_computed(own, at)

    def _add(self, text: Text, tokens: Many[int]) -> None:
        text.sequence.tokens += tokens
        if tokens and max(tokens) >= self._model.spec.vocab_size:
            self._lose(text)

    def _note_computed(self, own: Sequence, computed: int) -> None:
        before, own.computed = own.computed, computed
        self.blocks.computed(own, before)

    def _lose(self, text: Text) -> None:
        text.lost = True
        self.blocks.release(text.sequence)

    def read_on(self, texts: Many[tuple[Text, bool]]) -> list[Guess]:
        """Reads what is missing of these, in their order, a piece in all; what follows those that are whole then and
        wanted."""
        left, chunks = self._piece, dict[int, Chunk]()
        using = {text.sequence.order for text, _ in texts}
        for at, (text, wanted) in enumerate(texts):
            own = text.sequence
            count = min(own.pending, left)
            if count > 0 and self._make_room(own, count, using):
                whole = wanted and count == own.pending
                chunks[at] = Chunk(
                    own, own.computed, count, whole, DECODE if whole and count == 1 else PROMPT
                )
                left -= count
        guesses = self._run(chunks, len(texts))
        for at, chunk in chunks.items():
            if not texts[at][0].lost:
                texts[at][0].read = chunk.start + chunk.count
                self._note_computed(chunk.sequence, chunk.start + chunk.count)
        return guesses

    def guess_on(self, texts: Many[tuple[Text, int]]) -> list[Guess]:
        """What follows a token that was guessed for each of these last, where there is room for it."""
        chunks = dict[int, Chunk]()
        for at, (text, token) in enumerate(texts):
            own, end = text.sequence, len(text.sequence.tokens)
            known = end + 1 - own.computed
            if end < self.longest and self.blocks.grow_spare(own, known) == known:
                own.tokens.append(token)
                text.read = end + 1
                chunks[at] = Chunk(own, end, 1, True, DECODE)
        return self._run(chunks, len(texts))

    def _make_room(self, own: Sequence, count: int, using: Container[int]) -> bool:
        """Of the others whoever was not read for longest gives its blocks: they are found again while nobody needs
        them."""
        while not self.blocks.grow(own, count):
            order = next((order for order in self._texts if order not in using), None)
            if order is None:
                return False
            self._drop(order)
        return True

    def _run(self, chunks: Mapping[int, Chunk], count: int) -> list[Guess]:
        """A step of these chunks, each of one of `count` texts; guesses for those that are `last`."""
        found = [NO_GUESS] * count
        if not chunks:
            return found
        plan, pool = StepPlan(0, tuple(chunks.values())), self._kv.pool
        step = build_step(plan, pool.block_size, self._buffers, pool.further)
        x_RH = _result(self._runner.run_step(step))
        again = self._runner.settle_step(step)
        assert again is None, "experts of this process fail in no exchange"
        failed = self._runner.take_failures()
        rows_SH = x_RH if len(x_RH) == len(step.rows) else x_RH[step.row_R]
        guesses = iter(self._likeliest(rows_SH) if len(rows_SH) else ())
        for number, (at, chunk) in enumerate(chunks.items()):
            guess = next(guesses) if chunk.last else NO_GUESS
            if number in failed:
                self._lose(self._texts[chunk.sequence.order])
            else:
                found[at] = guess
        return found

    def _likeliest(self, rows_SH: Tensor) -> Iterator[Guess]:
        scores_SV = self._model.logits(rows_SH)
        chances = scores_SV.softmax(1).amax(1).tolist()
        return map(Guess, self._model.ops.argmax(scores_SV).tolist(), chances)

    def forget(self, sequence: Sequence) -> None:
        """It has ended; one that was never read is no error."""
        if sequence.order in self._texts:
            self._drop(sequence.order)

    def _drop(self, order: int) -> None:
        text = self._texts.pop(order)
        if not text.lost:
            self.blocks.release(text.sequence)

    def check(self) -> None:
        """Integrity of its blocks; for tests."""
        own = [text.sequence for text in self._texts.values() if not text.lost]
        self.blocks.check(own, ())


def _result(run: StepRun[LocalTicket]) -> Tensor:
    """Of a step that waits for nobody."""
    try:
        while True:
            next(run)
    except StopIteration as done:
        rows_RH: Tensor = done.value
        return rows_RH
