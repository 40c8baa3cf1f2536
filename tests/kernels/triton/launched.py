"""Whether kept launches are those that Triton would make; prints one JSON object, compiles nothing.

`python -m tests.kernels.triton.launched`: each of many random launches is made twice, prepared, and by Triton itself.
In a process of its own, as `variants.py`.
"""

import json
import random
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from afserve.kernels.triton.launch import PreparedLaunch, launched
from bench.gpu_chip import AbsentChip

MEMORY = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32)}
POINTERS = [x[start:] for x in MEMORY.values() for start in (0, 1, 4, 8, 16)] + [None]
NUMBERS = [0, 1, True, 1.0, 3, 16, 17, 4096, -1, -16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) + 1, 2.5]
FREE = [number for number in NUMBERS if type(number) is int]
GRIDS = [(7,), (2, 3), (4, 5, 6)]
LAUNCHES = 3000


@launched(do_not_specialize=["rows"])
def kernel(x_ptr, y_ptr, rows, size, COLUMNS: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    return


class Compiled:
    """In the place of what Triton compiles: it tells who it is and with what it was launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, told: list[object], *who: object) -> None:
        self._told, self._who = told, who

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *given: object) -> None:
        arguments = [
            (id(x), x) if x is None or isinstance(x, torch.Tensor) else (type(x), x) for x in given[9:]
        ]
        self._told.append((self._who, given[:6], [(at, None if at == id(x) else x) for at, x in arguments]))


def main() -> None:
    driver.set_active(AbsentChip(90))
    told: list[object] = []
    asked = twice = late = 0
    run = JITFunction.run

    def compiled(
        self: Any,
        key: object,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attrs: Any,
        *_: object,
    ) -> Compiled:
        who = str((signature, sorted(constants.items()), sorted(attrs.items()), options.num_warps))
        return Compiled(told, who)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return run(self, *args, **options)

    JITFunction._do_compile, JITFunction.run = compiled, counted
    draw, differ = random.Random(1), []
    for _ in range(LAUNCHES):
        arguments = draw.choice(POINTERS), draw.choice(POINTERS), draw.choice(FREE), draw.choice(NUMBERS)
        named = {
            "COLUMNS": draw.choice((16, 32)),
            "EVEN": draw.choice((True, False)),
            "num_warps": draw.choice((4, 8)),
        }
        names = draw.sample(sorted(named), len(named))
        constants, grid = {name: named[name] for name in names}, draw.choice(GRIDS)
        tensors, numbers = arguments[:2], arguments[2:]
        again = PreparedLaunch(kernel, grid, numbers, **constants)
        again(draw.choice(POINTERS), draw.choice(POINTERS))
        told.clear()
        begun = asked
        kernel[grid](*arguments, **constants)
        kernel[grid](*arguments, **constants)
        twice += asked - begun
        begun = asked
        again(*tensors)
        again(*tensors)
        if numbers[0] >> 31 == 0:
            other = PreparedLaunch(kernel, grid, (numbers[0], numbers[1]), 0, **constants)
            other(*tensors, free=numbers[0] ^ 5)
            other(*tensors, free=numbers[0])
            del told[-2]
        late += asked - begun
        run(kernel, *arguments, grid=grid, warmup=False, **constants)
        if any(one != told[0] for one in told):
            differ.append(str((told, arguments)))
    before = asked
    weight = torch.nn.Parameter(MEMORY[torch.float32])  # a kind of tensor that Triton has to look at
    triton.knobs.runtime.launch_enter_hook.add(len)
    kernel[1,](weight, None, 1, 1, COLUMNS=16, EVEN=True)
    kernel[1,](MEMORY[torch.float32], None, 1, 1, COLUMNS=16, EVEN=True)
    kernel[1,](MEMORY[torch.float32], None, 1, 1, COLUMNS=16, EVEN=True)
    print(json.dumps({"differ": differ[:3], "asked": twice, "late": late, "seen": asked - before}))


if __name__ == "__main__":
    main()
