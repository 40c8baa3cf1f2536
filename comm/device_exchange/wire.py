"""Which link an attention node gets, and which port an expert node: by what both ends agreed on and the transport
offers. Kernels are imported where they are needed only."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.m2n.rows import fused_on
from afserve.comm.transport import Box, Layout, SharingRegions, Transport
from afserve.errors import ConfigError
from afserve.kernels.devices.device import Device

if TYPE_CHECKING:
    from afserve.comm.device_exchange.ends import Patience

Inside = Callable[[Box], AbstractContextManager[None]]


def open_link(transport: Transport, **how: Any) -> ExpertLink:
    """`how` is as of `ExpertLink`. Raises ConfigError where the transport has no memory for what was agreed on."""
    if not transport.layout.exchange:
        return ExpertLink(transport, **how)
    from afserve.comm.device_exchange.link import DeviceLink

    patience = _patience(transport.device)
    return DeviceLink(transport, **how, regions=_regions(transport), patience=patience)


def open_port(
    transport: Transport,
    bank: Bank,
    device: torch.device,
    inside: Inside | None = None,
    recorder: Device | None = None,
) -> ExpertPort:
    """Raises as `open_link`. `inside`, `recorder`: see `SteppingPort`."""
    if not transport.layout.exchange:
        return ExpertPort(transport, device=device)
    from afserve.comm.device_exchange.served import SteppingPort

    return SteppingPort(transport, _regions(transport), bank, _patience(transport.device), inside, recorder)


def warm_exchange(layout: Layout, nodes: int, device: torch.device, dtype: torch.dtype) -> None:
    """What fills a message, and, where an exchange was agreed on, its kernels: see `rehearsal.rehearse`."""
    if fused_on(device) is not None:
        from afserve.comm.m2n.fused_message import rehearse_message

        rehearse_message(layout, device, dtype)
    if layout.exchange:
        from afserve.comm.device_exchange.rehearsal import rehearse

        rehearse(layout, nodes, device, dtype, _patience(device))


def _patience(device: torch.device) -> "Patience":
    """Where there is no device nobody waits: it is looked before."""
    from afserve.comm.device_exchange.ends import Patience

    return Patience() if device.type == "cuda" else Patience(1, timed=False)


def _regions(transport: Transport) -> SharingRegions:
    regions = transport.offers.regions
    if regions is None:
        raise ConfigError(
            "device_exchange: nodes share no memory of devices over this transport; use --transport symm, or leave "
            "--device-exchange out",
            param="device_exchange",
        )
    return regions
