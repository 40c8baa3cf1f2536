"""Which runner computes the steps of a node: the one place that asks model, link and kernels what they offer."""

from collections.abc import Sequence
from itertools import pairwise

from afserve.comm.m2n.link_contract import Link
from afserve.config import EngineConfig
from afserve.engine.kv.cache import KvCache
from afserve.engine.step.graph_runner import GraphRunner
from afserve.engine.step.layer_runner import LayerRunner
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.meter import Meter
from afserve.engine.step.runner import PredictorRunner, T
from afserve.engine.step.stack_runner import ExchangeRunner, LayerRange, StackRunner
from afserve.errors import ConfigError
from afserve.kernels.devices.device import Device
from afserve.kernels.devices.opened import device_of
from afserve.kernels.packed import PackedExperts
from afserve.models.decoder import AttentionModel


def choose_runners(
    model: AttentionModel,
    kv: KvCache,
    link: Link[T],
    load: ExpertLoad,
    meter: Meter,
    config: EngineConfig,
) -> Sequence[PredictorRunner[T]]:
    """One for each micro-batch, over the node's cache. Raises ConfigError where no step can be recorded."""
    _check_table(model, config)
    packed, exchanging, device = link.packed, link.exchanging, device_of(model.ops.device)
    layers = [
        LayerRunner(index, model, kv, link, load, meter, config.most_rows)
        for index in range(config.micro_batches)
    ]
    if config.step_graphs:
        _check_graphs(device, sends=bool(link.present), exchanges=config.device_exchange)
        return [GraphRunner[T](one, link, device, config.most_rows) for one in layers]
    if packed is None and (exchanging is None or model.head is not None):
        return layers
    parts = _parts(model, kv, packed)
    if not parts:
        return layers
    if exchanging is not None:
        return [ExchangeRunner[T](parts[0].stack, exchanging, one) for one in layers]
    predictor = model.stack(model.predicting, kv.predicting, [0] * len(kv.predicting), packed)
    sizes = kv.pool.block_size, *(group.block_size for group in kv.pool.further)
    return [StackRunner[T](parts, predictor, one, sizes) for one in layers]


def _check_table(model: AttentionModel, config: EngineConfig) -> None:
    if config.step_graphs and model.spec.table is not None:
        raise ConfigError(
            "--step-graphs: this model looks rows of a table up in each step, which a host does; leave it out",
            param="step_graphs",
        )


def _check_graphs(device: Device, *, sends: bool, exchanges: bool) -> None:
    if not device.records:
        raise ConfigError(
            f"--step-graphs: launches are recorded on GPUs; leave it out on {device.where}",
            param="step_graphs",
        )
    if sends and not exchanges:
        raise ConfigError(
            "--step-graphs: over expert nodes it takes --device-exchange, else a host has a part in every layer",
            param="step_graphs",
        )


def _parts(
    model: AttentionModel, kv: KvCache, packed: Sequence[PackedExperts] | None
) -> Sequence[LayerRange]:
    """All layers, apart where a head reads rows between them; none where the kernels do not run them so."""
    behind = () if model.head is None else model.head.behind
    cuts = sorted({0, len(model.layers), *behind})
    made = []
    for first, end in pairwise(cuts):
        groups = kv.group_of[first:end]
        stack = model.stack(model.layers[first:end], kv.halves[first:end], groups, packed)
        if stack is None:
            return ()
        made.append(LayerRange(stack, first, end, 1 + max(groups)))
    return made
