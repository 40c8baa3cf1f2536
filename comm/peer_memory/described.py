"""A tensor over memory that no allocator of PyTorch's made, through DLPack: the address, the length and the device.

The device is the one that the tensor is to be used on. A GPU that maps another one's memory computes with it as with
its own. Structures: `dlpack.h`, version 0.8 (what `torch.from_dlpack` takes from a capsule named "dltensor").
"""

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_UINT, _BITS = 1, 8
_CAPSULE = b"dltensor"
_Delete = ctypes.CFUNCTYPE(None, c_void_p)


class _Device(Structure):
    _fields_ = [("type", c_int32), ("index", c_int32)]


class _DataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Described(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("dimensions", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("offset", c_uint64),
    ]


class _Managed(Structure):
    _fields_ = [("tensor", _Described), ("context", c_void_p), ("delete", _Delete)]


_kept: dict[int, tuple[object, ...]] = {}  # by the address of what describes it: tensors that are there


def bytes_at(address: int, size: int, device: torch.device, keeper: object) -> Tensor:
    """`size` bytes there, uint8. `keeper` is let go of with the last tensor of that memory."""
    shape = (c_int64 * 1)(size)
    managed = _Managed(
        _Described(
            address,
            _Device(_DEVICE_TYPES[device.type], device.index or 0),
            1,
            _DataType(_UINT, _BITS, 1),
            shape,
            None,
            0,
        ),
        None,
        _delete,
    )
    _kept[ctypes.addressof(managed)] = managed, shape, keeper
    tensor: Tensor = from_dlpack(_capsule(managed))
    return tensor


def _forget(address: int) -> None:
    """Called by PyTorch, once, with the last tensor."""
    _kept.pop(address, None)


_delete = _Delete(_forget)


def _capsule(managed: _Managed) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [c_void_p, ctypes.c_char_p, c_void_p]
    return new(ctypes.addressof(managed), _CAPSULE, None)


assert ctypes.sizeof(_Managed) == 64 and ctypes.sizeof(c_size_t) == 8, (
    "DLPack's structures of another machine"
)
