"""Carries rows between a GPU and pinned host memory, for transports whose mailboxes are in host memory.

The host never waits for a copy. It starts one, polls its event, and uses or overwrites the bytes only after the event.
A copy to the GPU needs no polling: later work on that GPU is ordered behind it. It knows no mailboxes.
"""

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from afserve.kernels.devices.device import Device, Event
from afserve.kernels.devices.opened import device_of


class Copy(Protocol):
    """Tensors on their way to the host."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """On the host, theirs until the next copy of the same key; not to be read before it is `copied`."""

    def copied(self) -> bool: ...

    def wait(self) -> None:
        """Block until it is done; the device is all it waits for."""


class Stage(Protocol):
    """One thread's way between a device and the host. A `key` names the buffers that a copy goes through."""

    @property
    def device(self) -> torch.device: ...

    def to_host(self, key: Hashable, *tensors: Tensor) -> Copy: ...

    def to_device(self, key: Hashable, *tensors: Tensor) -> tuple[Tensor, ...]:
        """On the device; the tensors given may be overwritten at once."""


class DeviceCopy:
    def __init__(self, tensors: tuple[Tensor, ...], event: Event) -> None:
        self.tensors = tensors
        self._event = event

    def copied(self) -> bool:
        return self._event.done()

    def wait(self) -> None:
        self._event.wait()


class DeviceStage:
    """Copies in the device's current stream, in order with the kernels that make and use the rows."""

    def __init__(self, device: Device) -> None:
        self._device, self.device = device, device.where
        self._buffers: dict[Hashable, Tensor] = {}
        self._uploads: dict[Hashable, Event] = {}

    def to_host(self, key: Hashable, *tensors: Tensor) -> DeviceCopy:
        hosts = tuple(self._buffer((key, i, t.dtype), t) for i, t in enumerate(tensors))
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        return DeviceCopy(hosts, self._device.current().put_event())

    def to_device(self, key: Hashable, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The last upload of this key may still be read from its buffer; it was done long before, as a rule."""
        before = self._uploads.get(key)
        if before is not None:
            before.wait()
        hosts = tuple(self._buffer(("up", key, i, t.dtype), t) for i, t in enumerate(tensors))
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor)
        above = tuple(host.to(self.device, non_blocking=True) for host in hosts)
        self._uploads[key] = self._device.current().put_event()
        return above

    def _buffer(self, key: Hashable, like: Tensor) -> Tensor:
        """Pinned memory of the shape, which grows with what it is asked for."""
        known = self._buffers.get(key)
        if known is None or known.numel() < like.numel():
            size = max(like.numel(), 2 * known.numel() if known is not None else 0)
            known = self._buffers[key] = self._device.pinned(size, like.dtype)
        return known[: like.numel()].view(like.shape)


def stage_for(device: torch.device, payloads: torch.device) -> Stage | None:
    """What stands between a node on `device` and mailboxes on `payloads`; None where they share their memory."""
    return None if device.type == payloads.type else DeviceStage(device_of(device))
