"""Seconds of rows on their way: between attention and expert devices (M2N), and between all devices of colocated
expert parallelism.

A row of AFD goes once to each expert host that needs it and fans out over the host's own link. The two are stations of
their own. It knows no stage but transfers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afserve.placement.pipeline import larger, layer_period
from afserve.placement.planner.perf.attention import allreduce_seconds
from afserve.placement.planner.perf.engine import WIDTH_SECONDS
from afserve.placement.planner.perf.ffn import COMBINE_BYTES, DISPATCH_BYTES, distinct_targets, transfer
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.setting import Setting

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExchangeWay:
    """One direction of a layer's exchange: all its seconds, and those of them on the expert hosts' own links, where the
    rows of one micro-batch fan out while the network moves another's."""

    seconds: Array
    inside: Array


def ways_period(
    attention: Array, experts: Array, ways: tuple[ExchangeWay, ExchangeWay], micro_batches: int
) -> Array:
    """As `layer_period`, with the network and the hosts' own links as stations of their own."""
    there, back = ways
    out, into = there.seconds - there.inside, back.seconds - back.inside
    stations = layer_period(attention, experts, out, into, micro_batches)
    stations = larger(stations, micro_batches * larger(there.inside, back.inside))
    return np.asarray(larger(stations, attention + experts + there.seconds + back.seconds))


def m2n_ways(
    setting: Setting,
    attention_chip: Hardware,
    expert_chip: Hardware,
    tensor_parallel: int,
    ranks: Array,
    expert_devices: Array,
    rows: Array,
) -> tuple[ExchangeWay, ExchangeWay]:
    """Dispatch and combine of one layer; `rows` per rank."""
    total = ranks * tensor_parallel + expert_devices
    domain = min(attention_chip.fast_domain, expert_chip.fast_domain)
    shared = domain > 8 and attention_chip.name == expert_chip.name
    per_node = expert_chip.devices if expert_chip.fast_domain > 1 else 1
    nodes = np.ceil(expert_devices / per_node)
    copies = setting.targets(nodes)
    results = []
    for element in (DISPATCH_BYTES[setting.precision.experts], COMBINE_BYTES):
        row = setting.shape.expert_row * element
        sent = rows * row * copies / tensor_parallel
        received = ranks * rows * row * copies / expert_devices
        seconds = transfer(attention_chip, expert_chip, setting.decode_curves, sent, received)
        inside = np.zeros_like(seconds)
        if per_node > 1:
            inside = inside + _fanned(setting, expert_chip, received, expert_devices, nodes)
            seconds = seconds + inside
        if shared:
            near_copies = setting.targets(expert_devices)
            near = transfer(
                attention_chip,
                expert_chip,
                setting.decode_curves,
                sent / copies * near_copies,
                received / copies * near_copies,
                same_domain=True,
            )
            seconds, inside = np.where(total <= domain, near, seconds), np.where(total <= domain, 0.0, inside)
        results.append(ExchangeWay(np.asarray(seconds), np.asarray(inside)))
    return results[0], results[1]


def _fanned(setting: Setting, chip: Hardware, received: Array, devices: Array, nodes: Array) -> Array:
    """Seconds on the expert hosts' own link, either way, where each device has `received` bytes of the network. Rows
    that all devices need are gathered, and summed on the way back: either is half of an all-reduce."""
    if not setting.to_all:
        fan = setting.targets(devices) / setting.targets(nodes)
        spread = setting.decode_curves.pick("fast_link", "bf16")
        return np.asarray(received * np.maximum(fan - 1, 0.0) / (chip.link * spread.memory))
    held = np.minimum(devices, chip.devices)
    seconds = np.zeros(np.broadcast_shapes(np.shape(received), np.shape(devices)))
    for count in np.unique(held):
        whole = allreduce_seconds(chip, setting.decode_curves, received * count, int(count))
        seconds = np.where(held == count, whole / 2, seconds)
    return seconds


def all_to_all(setting: Setting, chip: Hardware, devices: Array, rows: Array) -> tuple[Array, Array]:
    """(dispatch, combine) of one layer of colocated expert parallelism, `rows` per device."""
    copies = distinct_targets(setting.shape.experts.top_k, devices) * (1 - 1 / np.maximum(devices, 1.0))
    results = []
    for element in (DISPATCH_BYTES[setting.precision.experts], COMBINE_BYTES):
        moved = rows * setting.shape.expert_row * element * copies
        near = transfer(chip, chip, setting.decode_curves, moved, moved, same_domain=chip.link > 0)
        far = transfer(chip, chip, setting.decode_curves, moved, moved)
        wider = setting.engine.rates.width * WIDTH_SECONDS * np.log2(np.maximum(devices, 1.0))
        results.append(np.asarray(np.where(devices <= max(chip.fast_domain, 1), near, far) + wider))
    return results[0], results[1]
