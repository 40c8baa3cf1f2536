"""What one request alone cannot be faster than: the weights and the cache that a token reads, over the bandwidth of the
devices that read them. Latency, compute and links are on top. Values only."""

from dataclasses import dataclass
from math import ceil

from afserve.placement.planner.perf.hardware import PRECISIONS
from afserve.placement.planner.perf.kv import cache_bytes
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question


@dataclass(frozen=True, slots=True)
class AloneBound:
    """attention, experts: bytes that one token reads, on so many devices each. seconds: of both, one by one."""

    attention: float
    experts: float
    attention_devices: int
    expert_devices: int
    seconds: float


def alone_bound(question: Question, plan: Plan) -> AloneBound:
    """Attention weights are read by one rank; each chosen expert by one device, or by all where they are sliced."""
    setting = question.setting_of(plan)
    shape, precision = setting.shape, setting.precision
    chips = {pool.chip.name: pool.chip for pool in question.pools}
    read = (shape.attention_elems - shape.vocab * shape.hidden) * PRECISIONS[precision.attention]
    attention = read + cache_bytes(shape, precision, setting.workload.context_mean)
    moe = shape.experts
    experts = moe.layers * moe.top_k * moe.elems * PRECISIONS[precision.experts]
    holders = plan.experts.devices if plan.kind == "afd" else plan.attention.devices // plan.decoders
    spread = holders if setting.split_experts else min(holders, ceil(moe.top_k))
    rank = plan.attention.tensor_parallel
    tokens = setting.tokens_per_step
    seconds = (
        attention / rank / chips[plan.attention.hardware].bandwidth
        + experts / spread / chips[plan.experts.hardware].bandwidth
    ) / tokens
    return AloneBound(attention, experts, rank, spread, seconds)


def alone_words(question: Question, plan: Plan) -> str:
    """For one request in flight; "" for more."""
    if plan.requests > 1:
        return ""
    bound = alone_bound(question, plan)
    words = (
        f"One request alone: a token reads {bound.attention / 1e9:,.2f} GB of attention weights and cache on "
        f"{bound.attention_devices} device{'s' * (bound.attention_devices != 1)} and {bound.experts / 1e9:,.2f} GB of "
        f"experts on {bound.expert_devices}, which takes {bound.seconds * 1e3:,.2f} ms by bandwidth alone; this plan "
        f"takes {plan.tpot * 1e3:,.2f} ms"
    )
    if plan.kind == "afd":
        words += ". Attention and experts take turns: experts apart pay for memory and for batches, not for this speed"
    return words
