"""Builds the libraries of DeepSpeed's asynchronous I/O, in a process of its own: importing DeepSpeed takes long, and
prints. Its environment says where to and how."""

from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder


def main() -> None:
    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):
        builder.jit_load(verbose=True)


if __name__ == "__main__":
    main()
