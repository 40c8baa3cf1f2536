"""Which device is at a place: the one list of them."""

import torch

from afserve.kernels.devices import cuda
from afserve.kernels.devices.device import Device
from afserve.kernels.devices.host import HostDevice


def device_of(where: torch.device) -> Device:
    return cuda.CudaDevice(where) if where.type == "cuda" else HostDevice(where)
