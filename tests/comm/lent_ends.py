"""One end of a loan of cores: `python -m tests.comm.lent_ends PAGE lend HERE THERE`, or `PAGE borrow THERE`.

Who lends ends with 0 once there is a message; who borrows computes without end.
"""

import sys
from typing import NoReturn

import torch
from torch import Tensor

from afserve.comm.mailbox.flags import BellWord, LaneWords, open_board
from afserve.kernels.ops import open_ops


def lend(memory_B: Tensor, here: int, there: int) -> NoReturn:
    board = open_board([LaneWords(memory_B, 64, 0, here)], [BellWord(memory_B, there)])
    board.lend(memory_B.data_ptr() + there, memory_B.data_ptr() + here)
    sys.exit(0 if board.wait([0], 120.0) == [0] else 1)


def borrow(memory_B: Tensor, there: int) -> NoReturn:
    ops = open_ops("cpu", 1)
    ops.borrow_core(memory_B, there)
    packed = ops.pack_linear(torch.randn(4096, 256).bfloat16())
    x = torch.randn(64, 256).bfloat16()
    while True:
        ops.linear(x, packed)


if __name__ == "__main__":
    page, what, *words = sys.argv[1:]
    ends = {"lend": lend, "borrow": borrow}
    ends[what](torch.from_file(page, shared=True, size=4096, dtype=torch.uint8), *map(int, words))
