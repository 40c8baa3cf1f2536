"""Measures how much longer stages take while another process computes experts all the time.

The cores of a machine share memory bandwidth and often more, so two nodes on it are slower than one alone. Started as a
module with one JSON argument, the process prints a line when it computes and ends with its standard input.
"""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from afserve.child import module
from afserve.cli.bench.marked import MarkedLink
from afserve.cli.bench.stages import Engine, Row, expert_rows
from afserve.config import ModelSource
from afserve.errors import PeerLost
from afserve.kernels.ops import open_ops
from afserve.models.experts import ExpertBank


@contextmanager
def neighbour(source: ModelSource, tokens: int) -> Iterator[None]:
    """It computes as long as the context lasts."""
    arguments = json.dumps({"source": asdict(source), "tokens": tokens})
    command = [*module("afserve.cli.bench.neighbour"), arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if not process.stdout.readline():
            raise PeerLost("neighbour", "it ended before it computed; what it said is above")
        yield
        process.stdin.close()


def beside_rows(engine: Engine, bank: ExpertBank, tokens: int, context: int, count: int) -> Iterator[Row]:
    """Seconds of an expert call and of a step without experts, `alone` and beside the neighbour."""
    alone = _both(engine, bank, tokens, context, count)
    with neighbour(engine.source, tokens):
        beside = _both(engine, bank, tokens, context, count)
    for stage, one, two in zip(("experts", "attention"), alone, beside, strict=True):
        yield {"part": "beside", "stage": stage, "requests": tokens, "alone": one, "seconds": two}


def _both(engine: Engine, bank: ExpertBank, tokens: int, context: int, count: int) -> tuple[float, float]:
    step = engine.steps(MarkedLink(engine.clock, engine.spec.hidden), tokens, context, count)
    return float(str(expert_rows(engine, bank, tokens, 1.0, 1.0)["seconds"])), step.seconds


def main(source: ModelSource, tokens: int) -> None:
    engine = Engine(source, open_ops("cpu", 1), 64)
    bank = engine.bank()
    expert_rows(engine, bank, tokens, 1.0, 1.0)
    print("computing", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        expert_rows(engine, bank, tokens, 1.0, 1.0)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(ModelSource(**given["source"]), given["tokens"])
