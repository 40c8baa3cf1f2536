"""A runner that replays what another one gave: the same plans, the same tokens, and no model anywhere."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from afserve.clock import FakeClock
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.cache import KvCache
from afserve.engine.micro_batch import MicroBatch
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.step.meter import Meter
from afserve.kernels.ops import open_ops
from afserve.models.decoder import AttentionModel
from tests.engine.driving import config, prompts

VOCABULARY = 211
DRAWN = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
SCORED = SamplingParams(max_tokens=20, temperature=0.0, prompt_logprobs=1, logprobs=2, ignore_eos=True)


def columns(step):
    """All that a runner is told, as the host's numbers."""
    paged = step.paged
    tensors = step.token_T, paged.position_T, paged.kv_slot_T, paged.block_table_SB, step.row_R
    host = paged.starts, paged.contexts, paged.max_query, paged.max_context, step.ends, step.decodes
    return [tensor.tolist() for tensor in tensors], host, (step.alone, step.all_rows, step.shared)


class Recorder:
    """A runner and the head behind it, with what went in and came out."""

    most_passes = 0

    def __init__(self, runner):
        self._runner = runner
        self.steps: deque[Any] = deque()
        self.settle_step, self.worst_mark = runner.settle_step, runner.worst_mark
        self.take_failures, self.decode_step = runner.take_failures, runner.decode_step

    def run_step(self, step):
        rows_RH = yield from self._runner.run_step(step)
        self.steps.append((columns(step), rows_RH.clone()))
        return rows_RH


class Replayer:
    most_passes = 0

    def __init__(self, steps):
        self._steps = steps

    def run_step(self, step):
        wanted, rows_RH = self._steps.popleft()
        assert columns(step) == wanted
        yield None  # as if it had to wait
        return rows_RH

    def decode_step(self, step, passes, stops):
        raise AssertionError("not offered")

    def settle_step(self, step):
        return None

    def worst_mark(self):
        return None

    def take_failures(self, worst=None):
        return {}


def recorded_logits(model, kept):
    """Notes what the head gives; also of what was prompt alone, where it is not asked."""
    plain = model.logits

    def noted(rows_RH):
        logits_RV = plain(rows_RH)
        kept.append((rows_RH.clone(), logits_RV.clone()))
        return logits_RV

    model.logits = noted


def replayed_logits(kept):
    def replay(rows_RH):
        wanted_RH, logits_RV = kept.popleft()
        assert wanted_RH.equal(rows_RH)
        return logits_RV

    return replay


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["v3", "qwen3-next"])
def test_recorded_steps_give_the_same_tokens_without_a_model(name, micro_batches, tiny_checkpoint):
    """Prompts in pieces, decoding beside them, preemption in a small cache, draws and log-probabilities."""
    engine = config(micro_batches=micro_batches, max_batch_tokens=16, kv_blocks=14, block_size=16)
    node = colocated(ModelSource(str(tiny_checkpoint(name)), name), engine)
    asked = [
        GenerationRequest(i, prompt, SCORED if i % 2 else DRAWN)
        for i, prompt in enumerate(prompts((5, 17, 33, 40, 60)))
    ]
    heads: deque[Any] = deque()
    tapes = []
    for micro_batch in node._micro_batches:
        micro_batch._runner = Recorder(micro_batch._runner)
        tapes.append(micro_batch._runner.steps)
    recorded_logits(node._micro_batches[0]._model, heads)
    for request in asked:
        node.submit(request)
    wanted = []
    while node.busy:
        wanted += node.step()
    assert node.stats().preemptions > 0 and all(tapes)

    scheduler = Scheduler(engine, VOCABULARY, frozenset())
    model = cast(AttentionModel, SimpleNamespace(ops=open_ops("cpu", 1), logits=replayed_logits(heads)))
    no_cache = cast(KvCache, SimpleNamespace())
    meter = Meter(FakeClock())
    again = [
        MicroBatch(index, model, no_cache, scheduler, Replayer(tape), meter, engine, node._load)
        for index, tape in enumerate(tapes)
    ]
    loops = [micro_batch.run() for micro_batch in again]
    for request in asked:
        scheduler.submit(request)
    found = []
    while scheduler.busy:
        for index, loop in enumerate(loops):
            if scheduler.has_work(index):
                next(loop)  # the step is under way
                next(loop)
                found += again[index].events
                again[index].events.clear()
    assert told(found) == told(wanted)
    assert not heads and not any(tapes)


def told(events):
    """All of them but for how long they took."""
    return [
        (e.handle, e.token_ids, e.finish_reason, e.logprobs, e.prompt_logprobs, e.cached_tokens)
        for e in events
    ]
