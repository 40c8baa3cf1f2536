"""NVIDIA's driver for memory, made of this host's: what `CudaDriver` asks for really is mapped and handed over.

It refuses what the real one would: a call without a context, properties that are not those of exportable memory, access
before a map. It counts what is held, so that a test sees what was left behind.
"""

import ctypes
import mmap
import os

from afserve.comm.peer_memory.cuda_driver import Properties

STEP = 1 << 16  # the granularity of memory
INVALID, UNKNOWN = 1, 999
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NONE = 0x10, 0


class FakeCuda:
    """`fails` says which function gives which error."""

    def __init__(self, fails=None, able=(102, 103)):
        self.fails, self.able = fails or {}, able
        self.contexts = 0
        self.handles, self.reserved, self.mapped = {}, {}, set()

    def __getattribute__(self, name):
        if name.startswith("cu") and name in object.__getattribute__(self, "fails"):
            return lambda *_: self.fails[name]
        return object.__getattribute__(self, name)

    @property
    def held(self):
        return len(self.handles) + len(self.reserved) + len(self.mapped) + self.contexts

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 77
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = attribute.value in self.able
        return 0

    def cuCtxPushCurrent_v2(self, context):
        assert context.value == 77
        self.contexts += 1
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts -= 1
        return 0

    def cuCtxSynchronize(self):
        return 0 if self.contexts else 201

    def cuGetErrorName(self, code, name):
        name._obj.value = {INVALID: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(
            code.value
        )
        return 0 if name._obj.value else INVALID

    def cuMemGetAllocationGranularity(self, step, properties, option):
        step._obj.value = STEP
        return 0

    def cuMemCreate(self, handle, size, properties, flags):
        asked = properties._obj
        assert isinstance(asked, Properties)
        if (
            not self.contexts
            or size.value % STEP
            or (asked.type, asked.handles, asked.location.type) != (1, 1, 1)
        ):
            return INVALID
        file = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(file, size.value)
        os.pwrite(file, b"\xa5" * 64, 0)  # what was there before
        handle._obj.value = self._keep(file)
        return 0

    def _keep(self, file):
        number = 1000 + len(self.handles) + file
        self.handles[number] = file
        return number

    def cuMemRelease(self, handle):
        os.close(self.handles.pop(handle.value))
        return 0

    def cuMemExportToShareableHandle(self, file, handle, kind, flags):
        if kind.value != 1:
            return INVALID
        file._obj.value = os.dup(self.handles[handle.value])
        return 0

    def cuMemImportFromShareableHandle(self, handle, file, kind):
        try:
            os.lseek(file.value, 0, os.SEEK_CUR)
        except OSError:
            return INVALID
        handle._obj.value = self._keep(os.dup(file.value))
        return 0

    def cuMemAddressReserve(self, address, size, alignment, wanted, flags):
        found = _LIBC.mmap(None, size.value, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        address._obj.value = found
        self.reserved[found] = size.value
        return 0

    def cuMemAddressFree(self, address, size):
        if self.reserved.pop(address.value) != size.value or address.value in self.mapped:
            return INVALID
        return _LIBC.munmap(address.value, size.value)

    def cuMemMap(self, address, size, offset, handle, flags):
        file = self.handles[handle.value]
        if self.reserved[address.value] != size.value or os.fstat(file).st_size < size.value:
            return INVALID
        _LIBC.mmap(address.value, size.value, _NONE, mmap.MAP_SHARED | _FIXED, file, 0)
        self.mapped.add(address.value)
        return 0

    def cuMemSetAccess(self, address, size, access, count):
        if address.value not in self.mapped or (access._obj.flags, count.value) != (3, 1):
            return INVALID
        return _LIBC.mprotect(address.value, size.value, mmap.PROT_READ | mmap.PROT_WRITE)

    def cuMemUnmap(self, address, size):
        if address.value not in self.mapped:
            return INVALID
        self.mapped.discard(address.value)
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        return 0 if _LIBC.mmap(address.value, size.value, _NONE, anonymous, -1, 0) else UNKNOWN

    def cuMemsetD8_v2(self, address, value, size):
        ctypes.memset(address.value, value.value, size.value)
        return 0
