"""Starts the nodes of one pipeline measurement, reads what they counted, and makes a row of it.

A *bubble* is the share of the time in which a node had nothing to compute. *Hidden* is the share of the time that rows
were under way during which their attention node computed something else.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, cast

from afserve.child import module
from afserve.errors import PeerLost

if TYPE_CHECKING:
    from afserve.cli.bench.pipeline_node import Counts, Setup

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class RunningNode:
    name: str
    process: "subprocess.Popen[str]"

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise PeerLost(self.name, "it ended in the middle of a measurement; what it said is above")
        return line

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_counts(self) -> "Counts":
        return cast("Counts", json.loads(self.read_line()))


@contextmanager
def _started(setup: "Setup") -> Iterator[RunningNode]:
    command = [*module("afserve.cli.bench.pipeline_node"), json.dumps(asdict(setup))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RunningNode(f"{setup.role}-{setup.index}", process)
            assert process.stdin is not None
            process.stdin.close()
        except BaseException:
            process.kill()
            raise


def disaggregated(setup: "Setup") -> Row:
    """`setup` but for role and index."""
    with ExitStack() as stack:
        experts = [
            stack.enter_context(_started(replace(setup, role="expert", index=f)))
            for f in range(setup.experts)
        ]
        fronts = [
            stack.enter_context(_started(replace(setup, role="attention", index=a)))
            for a in range(setup.attention)
        ]
        addresses = json.dumps([node.read_line() for node in experts])
        for node in fronts:
            node.tell(addresses)
        spent = _decode(fronts, experts)
    return _figures(setup, spent[: setup.attention], spent[setup.attention :])


def together(setup: "Setup") -> Row:
    """The colocated baseline on as many cores as all nodes have together."""
    threads = setup.threads * (setup.attention + setup.experts)
    alone = replace(
        setup, role="colocated", micro_batches=1, threads=threads, batch=setup.batch * setup.attention
    )
    with _started(alone) as node:
        spent = _decode([node], [])
    return {"mode": "colocated", "micro_batches": 1, "tok_s": _rate(spent)}


def _decode(fronts: Sequence[RunningNode], experts: Sequence[RunningNode]) -> "list[Counts]":
    """What each attention node counted from its start to its end, and each expert node while any of them decoded."""
    for node in fronts:
        node.read_line()
    for node in fronts:
        node.tell("go")
    starts = [node.read_counts() for node in fronts]
    ends = [node.read_counts() for node in fronts]
    spent = [{key: end[key] - start[key] for key in end} for start, end in zip(starts, ends, strict=True)]
    start, end = min(one["now"] for one in starts), max(one["now"] for one in ends)
    for node in experts:
        node.tell(f"{start} {end}")
    return spent + [node.read_counts() for node in experts]


def _rate(fronts: "Sequence[Counts]") -> float:
    return round(sum(one["generated_tokens"] / one["now"] for one in fronts), 1)


def _figures(setup: "Setup", fronts: "Sequence[Counts]", experts: "Sequence[Counts]") -> Row:
    def total(nodes: "Sequence[Counts]", key: str) -> float:
        return sum(node[key] for node in nodes)

    def bubble(nodes: "Sequence[Counts]") -> float:
        return round(1 - sum(node["busy_seconds"] / node["now"] for node in nodes) / len(nodes), 3)

    dispatches, calls = max(total(fronts, "dispatches"), 1), max(total(experts, "calls"), 1)
    under_way, parked = total(fronts, "under_way_seconds"), total(fronts, "parked_seconds")
    return {
        "mode": "afd",
        "micro_batches": setup.micro_batches,
        "shared_cores": setup.lends,
        "tok_s": _rate(fronts),
        "attention_us": round(total(fronts, "busy_seconds") / dispatches * 1e6, 1),
        "expert_us": round(total(experts, "busy_seconds") / calls * 1e6, 1),
        "under_way_us": round(under_way / dispatches * 1e6, 1),
        "attention_bubble": bubble(fronts),
        "expert_bubble": bubble(experts),
        "hidden": round(1 - parked / under_way, 3) if under_way else 0.0,
        "messages_per_call": round(total(experts, "messages") / calls, 2),
        "hold_us_per_call": round(total(experts, "hold_seconds") / calls * 1e6, 2),
    }
