"""The engine's choice of tokens as one call, by settings: what `gpu_steps sampler` times."""

from collections.abc import Callable

from torch import Tensor

from afserve.engine.sampler import Sampler
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.step.step_buffers import StepBuffers
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import open_ops


def settings() -> dict[str, SamplingParams]:
    return {
        "greedy": SamplingParams(max_tokens=64, temperature=0.0),
        "temperature": SamplingParams(max_tokens=64, temperature=0.8, seed=1),
        "top-k and top-p": SamplingParams(max_tokens=64, temperature=0.8, top_k=50, top_p=0.9, seed=1),
    }


def step_of(logits_RV: Tensor, params: SamplingParams) -> Callable[[], object]:
    """One token for each row, the host's work and the wait for the device included."""
    sampler = Sampler(open_ops(str(logits_RV.device), 1), StepBuffers(device_of(logits_RV.device), 1))
    rows = [
        Sequence.start(GenerationRequest(row, (1, 2, 3), params), 0, frozenset())
        for row in range(logits_RV.shape[0])
    ]

    def call() -> None:
        sampler.sample(logits_RV, rows)
        device_of(logits_RV.device).finish()

    return call
