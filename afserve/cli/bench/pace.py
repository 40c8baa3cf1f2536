"""How fast the machine is right now: expert calls on two cores at once, for half a second, in processes of their own.

A virtual machine's speed changes by tens of percent within minutes, because its host has other guests. Whoever measures
served runs takes the pace before and after each, and so can compare runs of different minutes. Started as a module with
one JSON argument, a process prints a line when it is ready, computes so many calls for each line it reads, and prints
their mean seconds; it ends with its standard input.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import fmean

from afserve.child import module
from afserve.cli.bench.stages import Engine, ExpertCalls
from afserve.config import ModelSource
from afserve.errors import PeerLost
from afserve.kernels.ops import open_ops
from afserve.launch.machine import this_machine

TOKENS = 16  # of each call
_MOST = 2  # processes
_TAKE = 0.5  # seconds
_TRIAL = 16  # calls, to find out how many fill a take


@contextmanager
def pace(source: ModelSource) -> Iterator[Callable[[], float]]:
    """What it yields takes half a second and says how long one call of one layer's experts took, in seconds, while
    another core did the same. Raises PeerLost when a process ended."""
    command = [*module("afserve.cli.bench.pace"), json.dumps(asdict(source))]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(min(_MOST, this_machine().cores))
        ]

        def hear(node: "subprocess.Popen[str]") -> str:
            assert node.stdout is not None
            said = node.stdout.readline()
            if not said:
                raise PeerLost("pace", "it ended before it had computed; what it said is above")
            return said

        def take(calls: int) -> float:
            for node in nodes:
                assert node.stdin is not None
                node.stdin.write(f"{calls}\n")
                node.stdin.flush()
            return fmean([float(hear(node)) for node in nodes])

        for node in nodes:
            hear(node)
        calls = max(1, round(_TAKE / take(_TRIAL)))
        yield lambda: take(calls)
        for node in nodes:
            assert node.stdin is not None
            node.stdin.close()


def main(source: ModelSource) -> None:
    engine = Engine(source, open_ops("cpu", 1), 64)
    calls = ExpertCalls(engine, engine.bank(), TOKENS, 1.0, 1.0)
    calls.turn()
    print("ready", flush=True)
    for line in sys.stdin:
        calls.turn(int(line))
        print(calls.turns.pop(), flush=True)


if __name__ == "__main__":
    main(ModelSource(**json.loads(sys.argv[1])))
