"""`afserve node` with Triton's kernels, interpreted on a CPU: a program that tests start in place of the command."""

import sys
from pathlib import Path

import torch

from tests.kernels.triton.interpret import interpret


def open_triton(device: str, threads: int, backend: str, isa: str):  # type: ignore[no-untyped-def]
    """In place of `open_ops`; own kernels alone, and an instruction set is that of native ones."""
    from afserve.kernels.ops import Ops
    from afserve.kernels.triton.backend import TritonBackend

    where = torch.device("cpu")
    print("kernels: Triton, interpreted", flush=True)
    return Ops(TritonBackend(where, multiprocessors=2), where, threads)


def main(role: str, join: str, token: str) -> None:
    interpret()  # before the kernels are imported
    from afserve.control.node import wiring
    from afserve.control.node.worker import NodeSettings, run_node
    from afserve.control.wire.channel import read_token

    wiring.open_ops = open_triton
    torch.set_num_threads(1)
    run_node(NodeSettings(role, join, read_token(Path(token))))


if __name__ == "__main__":
    main(*sys.argv[1:])
