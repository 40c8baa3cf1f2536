"""Builds the libraries of DeepSpeed's asynchronous I/O, in a process of its own: importing DeepSpeed takes long, and
prints. Its environment says where to and how."""

import ctypes

from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder


def main() -> None:
    pin_memory = PinMemoryBuilder().jit_load(verbose=True)
    ctypes.CDLL(pin_memory.__file__, mode=ctypes.RTLD_GLOBAL)  # the other one's functions call into it
    AsyncIOBuilder().jit_load(verbose=True)


if __name__ == "__main__":
    main()
