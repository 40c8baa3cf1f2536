"""Measures how much longer stages take while another process computes experts all the time.

The cores of a machine share memory bandwidth and often more, so two nodes on it are slower than one alone. Started as a
module with one JSON argument, the process prints a line when it is ready. Every line that it reads makes it begin, or
stop, and it says so; it ends with its standard input.
"""

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median

from afserve.child import module
from afserve.cli.bench.marked import MarkedLink
from afserve.cli.bench.stages import AttentionSide, ExpertCalls, Row
from afserve.config import AUTO, ModelSource
from afserve.engine.build import AnyBank
from afserve.errors import PeerLost
from afserve.kernels.ops import open_ops


@contextmanager
def neighbour(source: ModelSource, tokens: int, isa: str) -> Iterator[Callable[[], None]]:
    """What it yields makes the neighbour begin to compute, and the next time stop."""
    arguments = json.dumps({"source": asdict(source), "tokens": tokens, "isa": isa})
    command = [*module("afserve.cli.bench.neighbour"), arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, said = process.stdin, process.stdout
        assert asked is not None and said is not None

        def hear() -> None:
            if not said.readline():
                raise PeerLost("neighbour", "it ended before it computed; what it said is above")

        def turn() -> None:
            asked.write("\n")
            asked.flush()
            hear()

        hear()
        yield turn
        asked.close()


def beside_rows(
    engine: AttentionSide, bank: AnyBank, tokens: int, context: int, steps: int, turns: int
) -> Iterator[Row]:
    """Seconds of an expert call and of a step without experts, `alone` and beside the neighbour, in turns. What is
    told is how many times as long each took right after it was alone: the median."""
    link = MarkedLink(engine.clock, engine.spec.expert_width)
    decoding = engine.decode_batch(link, tokens, context, 2 * steps * turns)
    calls = ExpertCalls(engine, bank, tokens, 1.0, 1.0)

    def both() -> tuple[float, float]:
        link.clear_marks()
        calls.turn()
        return calls.turns[-1], decoding.go(steps).seconds

    alone, ratios = [], []
    with neighbour(engine.source, tokens, engine.ops.isa or AUTO) as begin_or_stop:
        for _ in range(turns):
            alone.append(both())
            begin_or_stop()
            ratios.append([two / one for one, two in zip(alone[-1], both(), strict=True)])
            begin_or_stop()
    for index, stage in enumerate(("experts", "attention")):
        one, ratio = median(pair[index] for pair in alone), median(pair[index] for pair in ratios)
        yield {"part": "beside", "stage": stage, "requests": tokens, "alone": one, "seconds": ratio * one}


def main(source: ModelSource, tokens: int, isa: str) -> None:
    engine = AttentionSide(source, open_ops("cpu", 1, isa=isa), 64)
    calls, computes = ExpertCalls(engine, engine.bank(), tokens, 1.0, 1.0), False
    calls.turn()
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0 if computes else None)[0]:
            if not sys.stdin.readline():
                return
            computes = not computes
            print("computes" if computes else "waits", flush=True)
        elif computes:
            calls.turn(2)
            calls.turns.clear()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(ModelSource(**given["source"]), given["tokens"], given["isa"])
