"""Bytes of weights per device, and of a request's cache. What they leave room for is said by `room.py`."""

import numpy as np
from numpy.typing import NDArray

from afserve.kernels.devices import scratch
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.hardware import PRECISIONS
from afserve.placement.planner.perf.shape import ModelShape

Array = NDArray[np.float64]
LATENT = ("mla", "sparse")


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
