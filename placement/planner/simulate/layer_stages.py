"""Stage times for the simulator: the closed forms of the plan in tables, with the randomness that those average away.

The attention time of a rank follows the sum of its requests' lengths, which are drawn anew as requests finish. The
expert time follows the rows of the fullest device in this draw. Messages that are merged cost what their rows cost
together.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afserve.placement.pipeline import layer_period
from afserve.placement.planner.perf.drafting import NOBODY
from afserve.placement.planner.perf.exchange import ExchangeWay, m2n_ways
from afserve.placement.planner.perf.halves import attention_half, expert_half, ffn_there
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.prefill import decoding_only, ended
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages, prompt_seconds
from afserve.placement.planner.plan import Plan

Array = NDArray[np.float64]
_POINTS = 24


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """One direction of a layer's exchange, seconds: a rank's own link is taken for `own`, the experts' links for
    `shared` by each rank's rows, and `latency` takes neither."""

    own: float
    shared: float
    latency: float

    def seconds(self, ranks: int) -> float:
        """Of an exchange that all ranks begin at once."""
        return max(self.own, self.shared * ranks) + self.latency


class StageTable:
    """Times for one plan. `random_lengths` off and `random_routing` off give the closed form's means exactly."""

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        attention: Hardware,
        experts: Hardware,
        *,
        random_lengths: bool = True,
        random_routing: bool = True,
    ) -> None:
        self._layers = setting.shape.experts.layers
        self._ranks = plan.ranks
        decoding = decoding_only(setting) if plan.prefill else setting
        requests = np.array([float(plan.ranks * plan.batch * plan.micro_batches)])
        measured = setting.engine.factor(
            decoding.like(attention, "afd"),
            requests,
            np.array([float(plan.attention.devices + plan.experts.devices)]),
        )
        self._factor = float(measured[0])
        self._answer = setting.workload.mean_answer
        self._prepare_attention(setting, plan, attention, experts, random_lengths)
        self._prepare_experts(setting, plan, attention, experts, random_routing)
        self._prepare_links(setting, plan, attention, experts)

    def _prepare_attention(
        self, setting: Setting, plan: Plan, chip: Hardware, experts: Hardware, random_lengths: bool
    ) -> None:
        """Attention is close to linear in the mean context: two points give the line."""
        one, batch = np.array([1.0]), np.array([float(plan.batch)])
        work = setting.workload
        mean = _at_context(setting, work.context_mean)
        more = _at_context(setting, work.context_mean * 1.5)
        degree, with_ffn = plan.attention.tensor_parallel, not setting.shared_on_experts
        base = attention_half(mean, chip, degree, one, batch, with_ffn)
        longer = attention_half(more, chip, degree, one, batch, with_ffn)
        sent = batch * setting.rows_per_request
        exchange = setting.exchange_at_attention(sent, np.array([float(plan.experts.devices)]))
        self._attend = self._factor * (float(base.moe_layers[0]) / self._layers + float(exchange[0]))
        further = self._factor * float(longer.moe_layers[0] - base.moe_layers[0]) / self._layers
        self._slope = further / (0.5 * work.context_mean)
        self._outside = self._factor * float(base.outside[0])
        if setting.shared_on_experts:
            self._outside -= (
                setting.shape.dense_layers * self._factor * float(base.moe_layers[0]) / self._layers
            )
        self._outside += _drafting(setting, plan, chip, experts)
        self._deviation = work.context_deviation / plan.batch**0.5 if random_lengths else 0.0
        self._offset = np.zeros((plan.ranks, plan.micro_batches))
        self._drawn = False

    def _prepare_experts(
        self, setting: Setting, plan: Plan, attention: Hardware, chip: Hardware, random_routing: bool
    ) -> None:
        tokens_each = plan.batch * setting.rows_per_request
        self._messages = np.unique(np.round(np.geomspace(1, plan.ranks, _POINTS)))
        devices = np.full_like(self._messages, float(plan.experts.devices))
        here = tokens_each * setting.targets(devices) / devices
        tokens = self._messages * tokens_each
        computed = expert_half(setting, chip, tokens, devices, slices=setting.split_experts)
        if setting.shared_on_experts:
            computed = computed + ffn_there(
                setting, chip, tokens, devices, setting.shape.experts.shared_elems
            )
            dense = ffn_there(setting, chip, tokens, devices, setting.shape.dense_elems)
            self._dense = self._factor * float(dense[-1])
        if plan.prefill is not None:
            all_ranks, resident = np.array([float(plan.ranks)]), float(plan.batch * plan.micro_batches)
            together = prompt_seconds(setting, attention, chip, 1, all_ranks, devices[:1])[1]
            prompts = ended(setting, np.array([resident])) * together
            turns = self._layers * plan.micro_batches * plan.ranks
            computed = computed + float(prompts[0]) / turns * self._messages
        self._expert_times = self._factor * (computed + setting.exchange_at_experts(here, self._messages))
        rows = plan.ranks * tokens_each * setting.shape.experts.top_k / plan.experts.devices
        self._row_noise = 0.3 / max(rows, 1.0) ** 0.5 if random_routing else 0.0

    def _prepare_links(self, setting: Setting, plan: Plan, attention: Hardware, experts: Hardware) -> None:
        """Split each transfer into time on the rank's link, time on the experts' (the network, or inside their hosts:
        whichever is longer), and latency."""
        ranks, devices = np.array([float(plan.ranks)]), np.array([float(plan.experts.devices)])
        rows = np.array([plan.batch * setting.rows_per_request])

        def wires(sender: Hardware, receiver: Hardware, some: Array) -> tuple[ExchangeWay, ExchangeWay]:
            degree = plan.attention.tensor_parallel
            return m2n_ways(setting, sender, receiver, degree, ranks, devices, some)

        whole, empty = wires(attention, experts, rows), wires(attention, experts, 0 * rows)
        own = wires(attention, _endless(experts), rows)
        there = wires(_endless(attention), experts, rows)
        self.dispatch, self.combine = (
            _link(*ways, plan.ranks, self._factor) for ways in zip(whole, empty, own, there, strict=True)
        )
        if setting.shared_on_experts:
            self._outside += setting.shape.dense_layers * self._dense_turn(plan.micro_batches)

    def _dense_turn(self, micro_batches: int) -> float:
        """A dense layer's turn on the experts' side, as time of its rank: the event loop knows one kind of layer."""
        there, back = (link.seconds(self._ranks) for link in (self.dispatch, self.combine))
        return layer_period(self._attend, self._dense, there, back, micro_batches) / micro_batches

    @property
    def full_expert_seconds(self) -> float:
        """The expert stage with the rows of every rank."""
        return float(self._expert_times[-1])

    def new_step(self, ranks: NDArray[np.int64], batch: int, random: np.random.Generator) -> None:
        """Lengths drift slowly: a step replaces 1/answer of the requests (an AR(1) with that memory)."""
        if self._deviation <= 0:
            return
        keep = 1 - 1 / max(self._answer, 2.0) if self._drawn else 0.0
        if not self._drawn:
            self._offset = random.normal(0.0, self._deviation, self._offset.shape)
            self._drawn = True
        noise = random.normal(0.0, self._deviation * (1 - keep**2) ** 0.5, len(ranks))
        self._offset[ranks, batch] = keep * self._offset[ranks, batch] + noise

    def attention(self, ranks: NDArray[np.int64], batch: int) -> Array:
        longer = self._attend + self._slope * self._offset[ranks, batch]
        return np.asarray(np.maximum(longer, 0.2 * self._attend))

    @property
    def outside(self) -> float:
        return self._outside

    def experts(self, messages: int, random: np.random.Generator) -> float:
        seconds = float(np.interp(messages, self._messages, self._expert_times))
        return seconds * (1 + abs(random.normal(0.0, self._row_noise)) if self._row_noise else 1.0)


def _endless(chip: Hardware) -> Hardware:
    """With wires that take no time."""
    return replace(chip, network=np.inf, link=np.inf)


def _link(
    whole: ExchangeWay, empty: ExchangeWay, own: ExchangeWay, there: ExchangeWay, ranks: int, factor: float
) -> LinkTimes:
    """From the whole exchange, one without rows, and those that only one end slows."""
    latency, outer = (float(way.seconds[0] - way.inside[0]) for way in (empty, there))
    sent = float(own.seconds[0] - own.inside[0]) - latency
    received = max(outer - latency, float(there.inside[0]))
    rest = float(whole.seconds[0]) - max(sent, received)
    return LinkTimes(factor * sent, factor * received / ranks, factor * rest)


def _drafting(setting: Setting, plan: Plan, attention: Hardware, experts: Hardware) -> float:
    """Seconds of the drafter for each micro-batch of a step, as time of its rank: the event loop knows one kind of
    layer."""
    if not setting.drafts.passes:
        return 0.0
    ranks, devices, batch = (
        np.array([float(count)]) for count in (plan.ranks, plan.experts.devices, plan.batch)
    )
    degree, m = plan.attention.tensor_parallel, plan.micro_batches
    decoding = decoding_only(setting)
    both = (
        afd_stages(one, attention, experts, degree, m, ranks, devices, batch).outside[0]
        for one in (decoding, replace(decoding, drafts=replace(setting.drafts, drafter=NOBODY)))
    )
    return float(next(both) - next(both))


def _at_context(setting: Setting, context: float) -> Setting:
    return replace(setting, workload=replace(setting.workload, context_mean=context, context_deviation=0.0))
