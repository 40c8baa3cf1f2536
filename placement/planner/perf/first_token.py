"""The first token where clients keep a fixed number of requests in flight, as benchmark clients do.

A prompt waits for those that were sent with it, for the step in progress, and for memory or a seat to come free. The
shares of each are an engine's (`engine.Wait`). Where requests come at random, `stages.py` has a queue instead.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.pipeline import larger
from afserve.placement.planner.perf.engine import PLAIN, Wait
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import prompt_seconds

Array = NDArray[np.float64]
STEP_TOKENS = 8192
"""Of prompts in one step: what vLLM and TensorRT-LLM take by default on such devices, and SGLang at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Crowd:
    """What the first token waits for. attention, experts, weights: kernel seconds of one prompt, the last those of a
    pass over the experts' weights, which up to `together` prompts of one step share. running: requests that are read or
    in decode on a rank, `total` on all; workers: prefill instances per rank; step: seconds; apart: 1 where prompts run
    elsewhere."""

    attention: Array
    experts: Array
    weights: Array
    together: Array
    running: Array
    total: Array
    concurrency: Array
    answer: Array
    step: Array
    workers: Array
    apart: Array

    def prompt(self, wait: Wait, sharers: Array | float) -> Array:
        """Seconds of a prompt, of so many in a step."""
        return wait.attention * self.attention + wait.experts * (self.experts + self.weights / sharers)


def first_token(crowd: Crowd, wait: Wait, factor: Array | float) -> Array:
    """Seconds from a request to its first token, the mean over requests. Two things come on top of the prompts in
    front: a full prefill side lets every prompt wait for all others but those in decode, and requests beyond those
    that run wait for a whole answer. Who waits for the one does not wait for the other."""
    front = np.maximum(crowd.running / crowd.workers - 1, 0.0)
    among = crowd.prompt(wait, np.clip(front + 1, 1, crowd.together))
    start = wait.start + wait.steps * crowd.step + wait.request * 1e-4 * crowd.total
    light = (start + crowd.prompt(wait, 1.0) + wait.queued * front**wait.power * among) * factor
    reading = crowd.concurrency * crowd.prompt(wait, crowd.together) / crowd.workers
    full = crowd.apart * (reading - crowd.answer * crowd.step)
    blocked = (crowd.concurrency / crowd.total - 1) * crowd.answer * crowd.step
    return np.asarray(larger(light + np.maximum(blocked, 0.0), np.asarray(full)))


def served_first_token(
    setting: Setting, chip: Hardware, tensor_parallel: int, ranks: Array, resident: Array, step: Array
) -> Array:
    """The same as the engine's rows correct it, for layouts of colocated ranks; arguments as of `crowd_of`."""
    crowd = crowd_of(setting, chip, tensor_parallel, ranks, resident, step)
    requests, devices = ranks * resident, ranks * tensor_parallel
    alone, several = (
        setting.engine.wait_factor(setting.like(chip, setting.colocated(count)), requests, devices)
        for count in (1, 2)
    )
    return first_token(crowd, setting.engine.wait, np.where(ranks > 1, several, alone))


def readers_keep_up(
    setting: Setting, chip: Hardware, tensor_parallel: int, ranks: Array, batch: Array, tpot: Array
) -> NDArray[np.bool_]:
    """Whether readers bring as many requests as end where `batch` per rank decode at `tpot` seconds a token."""
    crowd, wait = crowd_of(setting, chip, tensor_parallel, ranks, batch, tpot), setting.engine.wait
    reading = crowd.total * crowd.prompt(wait, crowd.together) / crowd.workers
    return np.asarray(reading <= crowd.answer * tpot)


def crowd_of(
    setting: Setting, chip: Hardware, tensor_parallel: int, ranks: Array, resident: Array, step: Array
) -> Crowd:
    """`resident` requests per rank run, a step takes `step` seconds, on colocated ranks of `chip`. Where prompts are
    read elsewhere, those that are read there run too."""
    here = replace(
        setting, engine=PLAIN, workload=replace(setting.workload, decode_only=False), concurrency=0.0
    )
    prefill = setting.prefill
    tokens = setting.workload.mean_prompt * (1 - setting.found.found_share)
    together = max(int(STEP_TOKENS / max(tokens, 1.0)), 1)
    attention, alone = _reading(here, chip, tensor_parallel, ranks)
    weights = (alone - _reading(here, chip, tensor_parallel, ranks, together)[1]) / (1 - 1 / max(together, 2))
    total = ranks * resident
    return Crowd(
        attention=attention,
        experts=alone - weights,
        weights=weights,
        together=np.full_like(total, float(together)),
        running=resident if prefill is None else total,
        total=np.minimum(total, max(setting.concurrency, 1.0)),
        concurrency=np.full_like(total, max(setting.concurrency, 1.0)),
        answer=np.full_like(total, setting.workload.mean_answer),
        step=step,
        workers=np.full_like(total, 1.0 if prefill is None else prefill.workers),
        apart=np.full_like(total, float(prefill is not None)),
    )


def _reading(
    setting: Setting, chip: Hardware, tensor_parallel: int, ranks: Array, together: int = 1
) -> tuple[Array, Array]:
    """(attention, experts): kernel seconds of a prompt, `together` in a step, on the ranks or who reads for them."""
    prefill = setting.prefill
    if prefill is None:
        return prompt_seconds(setting, chip, chip, tensor_parallel, ranks, ranks * tensor_parallel, together)
    found, one = np.zeros((2, *np.shape(ranks))), np.ones(1)
    splits = np.full_like(ranks, prefill.devices) if prefill.devices else ranks * tensor_parallel
    for split in np.unique(splits):
        found[:, splits == split] = prompt_seconds(
            setting, chip, chip, int(split), one, one * split, together
        )
    return found[0], found[1]
