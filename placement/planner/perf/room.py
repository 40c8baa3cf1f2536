"""What fits beside weights: the caches of a device, and the largest batch that has room there.

Of this project's own nodes it is what `afserve up` keeps on such a device (`node_room`, `kv_blocks`); other engines
give weights and caches a share of a device. Requests have random lengths, so the cache is sized for the 99th percentile
of their sum. Sizing for the mean would overflow about half of the time, and sizing for the maximum length would waste
most of the memory.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.kv_blocks import GPU_BLOCK, KvRoom, balanced_block, of_step
from afserve.placement.node_room import kv_bytes, left_by
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware
from afserve.placement.planner.perf.kv import attention_weight_bytes, cache_bytes
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.shape import ModelShape

Array = NDArray[np.float64]
_STEP_TOKENS = 2048  # of a node on a GPU, at most
_EXPERTS_ALONE = 0.92  # of a device of another engine that has nothing else
_P99 = 2.326


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Of one device: `size` bytes for caches, of which `fixed` are no request's. `request`: bytes of one request of
    `context` tokens."""

    size: Array
    context: float
    request: float
    fixed: float = 0.0

    @property
    def tokens(self) -> Array:
        """Of requests of that length; 0 where weights do not fit."""
        return np.asarray(np.maximum(self.size - self.fixed, 0.0) / self.request * self.context)

    def requests(self, deviation: float) -> Array:
        """As many as have room with 99 % certainty, whose lengths deviate by so many of their mean: n requests take
        n + 2.33*sqrt(n)*deviation of them; solved for sqrt(n). 0 where weights do not fit."""
        spread, mean = _P99 * deviation, self.tokens / self.context
        return np.asarray(np.floor(((np.sqrt(spread**2 + 4 * mean) - spread) / 2) ** 2 + 1e-9))


def cache_room(
    setting: Setting, chip: Hardware, tensor_parallel: int, resident: Array | float, context: float
) -> CacheRoom:
    """Of each device of an attention rank of so many, with `resident` bytes of experts beside the rank's weights."""
    shape, precision, context = setting.held, setting.precision, max(context, 1.0)
    taken = attention_weight_bytes(shape, precision, tensor_parallel) + np.asarray(resident)
    taken = taken + setting.kernel_bytes(chip)
    split = min(tensor_parallel, *(group.kv_heads for group in shape.attention))
    if not setting.engine.own:
        size = chip.memory * setting.engine.memory - taken
        return CacheRoom(size, context, cache_bytes(shape, precision, context) / split)
    blocks, window = blocks_of_node(shape, precision, gpu=not chip.isa)
    request, apart = blocks.bytes_of_request(context, window)
    fixed = blocks.seen * blocks.windowed if apart else 0
    size = kv_bytes(left_by(chip.memory, taken), own=True)
    return CacheRoom(size, context, request / split, fixed / split)


def largest_batch(setting: Setting, chip: Hardware, tensor_parallel: int, resident: Array | float) -> Array:
    """Requests that such a rank can hold."""
    mean, deviation = setting.workload.context_mean, setting.workload.context_deviation
    return cache_room(setting, chip, tensor_parallel, resident, mean).requests(deviation / max(mean, 1.0))


def hold_experts(setting: Setting, chip: Hardware, weights: Array) -> NDArray[np.bool_]:
    """Whether devices that have nothing else hold so many bytes each."""
    if setting.engine.own:
        return np.asarray(left_by(chip.memory, weights) >= 0)
    return np.asarray(weights <= chip.memory * _EXPERTS_ALONE)


def blocks_of_node(shape: ModelShape, precision: Precision, *, gpu: bool) -> tuple[KvRoom, int]:
    """The cache of one of this project's nodes, as `afserve up` counts it, but for what running sequences see in layers
    with a window; and the tokens of that."""
    element, groups = int(PRECISIONS[precision.kv]), shape.attention
    tokens = [group.layers * group.cached_bytes(element) for group in groups]
    windows = [0 if group.chunked else group.holds for group in groups]
    windows = windows if not all(windows) else [0] * len(windows)
    own = sum(size for size, window in zip(tokens, windows, strict=True) if window)
    states = 4 * sum(group.layers * group.state_elems for group in groups)
    block = GPU_BLOCK if gpu and not states else balanced_block(states, sum(tokens))
    return KvRoom(
        block, block * (sum(tokens) - own) + states, block * own, of_step(_STEP_TOKENS, block)
    ), max(windows)
