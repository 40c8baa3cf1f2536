"""What fits into memory: bytes of weights and caches per device, and the largest batch that they leave room for.

Requests have random lengths, so the cache is sized for the 99th percentile of their sum. Sizing for the mean would
overflow about half of the time, and sizing for the maximum length would waste most of the memory.
"""

import numpy as np
from numpy.typing import NDArray

from afserve.kernels.devices import scratch
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.hardware import PRECISIONS, Hardware
from afserve.placement.planner.perf.shape import ModelShape
from afserve.placement.planner.perf.workload import Workload

Array = NDArray[np.float64]
USABLE = 0.90
"""Share of device memory for weights and caches; the rest is workspace, graphs and fragmentation."""
LATENT = ("mla", "sparse")
_P99 = 2.326


def attention_weight_bytes(shape: ModelShape, precision: Precision, tensor_parallel: int) -> float:
    """Per device. The embedding and head stay in bf16, and so does an encoder, which is whole on one."""
    table, encoder = 2 * shape.vocab * shape.hidden, shape.encoder
    body = (shape.attention_elems - table) * PRECISIONS[precision.attention]
    whole = encoder.parameters_beside(shape.hidden) * PRECISIONS["bf16"] if encoder else 0.0
    return (body + table * PRECISIONS["bf16"]) / tensor_parallel + whole


def shared_weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """Shared experts and dense FFNs, which some systems keep on the expert side."""
    elems = shape.experts.layers * shape.experts.local_elems + shape.dense_layers * shape.dense_elems
    return elems * PRECISIONS[precision.attention]


def expert_weight_bytes(shape: ModelShape, precision: Precision, routing: Routing, devices: Array) -> Array:
    """Per device, replicas included, slots rounded up to whole experts while there are more slots than devices."""
    slots = routing.slots(shape.experts.experts) / devices
    slots = np.where(slots >= 1, np.ceil(slots), slots)
    return np.asarray(slots * shape.experts.layers * shape.experts.elems * PRECISIONS[precision.experts])


def kernel_bytes(shape: ModelShape) -> int:
    """What this project's attention takes of a device beside weights and caches: the same as `afserve up` counts."""
    latents = [group.kv_elems for group in shape.attention if group.kind in LATENT]
    return scratch.of_prompts(max(latents)) if latents else 0


def cache_bytes(shape: ModelShape, precision: Precision, context: float) -> float:
    """One request's cache over all layers; the fixed states of linear layers are kept in float32."""
    state = sum(group.layers * group.state_elems for group in shape.attention)
    return (shape.kv_elems(context) - state) * PRECISIONS[precision.kv] + 4.0 * state


def largest_batch(
    shape: ModelShape,
    chip: Hardware,
    precision: Precision,
    workload: Workload,
    tensor_parallel: int,
    resident: Array | float = 0.0,
    usable: float = USABLE,
) -> Array:
    """Requests one attention rank (of `tensor_parallel` devices) can hold; 0 when not even the weights fit.

    `resident`: bytes per device taken by something else, such as colocated experts. `usable`: share of memory that the
    engine gives to weights and caches. n requests take n*mean +
    2.33*sqrt(n)*deviation of tokens with 99 % certainty; solved for sqrt(n).
    """
    free = (
        chip.memory * usable
        - attention_weight_bytes(shape, precision, tensor_parallel)
        - np.asarray(resident)
    )
    split = min(tensor_parallel, *(group.kv_heads for group in shape.attention))
    per_request = cache_bytes(shape, precision, workload.context_mean) / split
    spread = per_request * _P99 * workload.context_deviation / max(workload.context_mean, 1.0)
    room = np.maximum(free, 0.0)
    root = (-spread + np.sqrt(spread**2 + 4 * per_request * room)) / (2 * per_request)
    return np.asarray(np.floor(root**2 + 1e-9))
