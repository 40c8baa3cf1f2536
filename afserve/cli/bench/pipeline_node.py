"""One node of a pipeline measurement, a process of its own that is driven by lines on its standard input.

Started as a module with one JSON argument. An attention node prints `ready`, decodes after the line `go`, and prints
its counters where the counted part begins and where it ends. An expert node prints its address, and on a line with two
times what it counted between them. Either ends with its input. Everything but the requests is what `afserve up` runs.
"""

import json
import select
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from afserve.cli.bench.case import prompts
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transport import Layout, Transport
from afserve.comm.transports import connect
from afserve.config import AUTO, EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import build_attention_node, build_expert_bank, colocated, layout_for, spec_of
from afserve.engine.expert_node import ExpertNode
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.step.runner import T
from afserve.kernels.ops import Ops, open_ops
from afserve.placement.placement import Placement

Counts = dict[str, float]  # seconds and calls by name, and `now`

_WARM_TOKENS = 8  # of each sequence, before counting
_LAST_TOKENS = 4  # of each, after it
_LISTEN_SECONDS = (
    0.02  # how often a node looks whether it is asked something, and an expert node notes its counters
)
_PARK = 0.02


@dataclass(frozen=True, slots=True)
class Setup:
    """What every node of one measurement is told. `batch` are the sequences of each attention node. `share_cores` and
    `expert_dtype` as the settings of these names.

    `role` is attention, expert or colocated.
    """

    source: ModelSource
    role: str
    index: int
    attention: int
    experts: int
    micro_batches: int
    batch: int
    prompt_len: int
    output_len: int
    threads: int
    share_cores: bool = False
    expert_dtype: str = "auto"
    isa: str = AUTO

    @property
    def lends(self) -> bool:
        return self.share_cores and self.attention == self.experts == self.threads == 1

    @classmethod
    def read(cls, text: str) -> "Setup":
        given = json.loads(text)
        return cls(**{**given, "source": ModelSource(**given["source"])})

    @property
    def engine(self) -> EngineConfig:
        longest = self.prompt_len + self.output_len + 2
        blocks = self.batch * (2 + longest // 16) + 16
        return EngineConfig(
            longest,
            blocks,
            micro_batches=self.micro_batches,
            prefix_caching=False,
            threads=self.threads,
            expert_dtype=self.expert_dtype,
            isa=self.isa,
        )

    def lend_cores(self, transport: Transport, ops: Ops) -> None:
        """As `afserve up` does for two nodes of a host."""
        sharing = transport.offers.sharing_cores
        if self.lends and sharing is not None:
            sharing.share_cores(ops.borrow_core)

    def plan(self) -> Placement:
        spec = spec_of(self.source)
        return Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=self.experts)

    def mailbox_layout(self) -> Layout:
        return layout_for(self.source, spec_of(self.source), self.engine, self.plan().slots_per_node())


class Questions:
    """Standard input, looked at now and then: a look costs as much as a small message."""

    def __init__(self) -> None:
        self._next = 0.0
        self.over = False

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LISTEN_SECONDS
        return True

    def asked(self) -> str:
        """A line, or nothing."""
        if not select.select([sys.stdin], [], [], 0)[0]:
            return ""
        line = sys.stdin.readline()
        self.over = not line
        return line


def say(what: str) -> None:
    print(what, flush=True)


def counts(stats: object) -> Counts:
    """Whole counts and seconds, and the time."""
    found = {name: getattr(stats, name) for name in (f.name for f in fields(stats))}  # type: ignore[arg-type]
    numbers = {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
    return {**numbers, "now": time.monotonic()}


def between(noted: Sequence[Counts], start: float, end: float) -> Counts:
    """What was counted from the last note before `start` to the first behind `end`, so never less than was done."""
    times = [one["now"] for one in noted]
    first = noted[max(bisect_right(times, start) - 1, 0)]
    last = noted[min(bisect_left(times, end), len(noted) - 1)]
    return {key: last[key] - first[key] for key in last}


def serve_experts(setup: Setup) -> None:
    plan = setup.plan()
    end, address = connect.listen(
        "shm", expert=setup.index, attention_nodes=setup.attention, layout=setup.mailbox_layout()
    )
    ops = open_ops("cpu", setup.threads, isa=setup.isa)
    setup.lend_cores(end, ops)
    slots, kept = plan.slots_per_node(), setup.expert_dtype
    bank = build_expert_bank(setup.source, plan.held(setup.index), slots, expert_dtype=kept, ops=ops)
    node = ExpertNode(ExpertPort(end), bank, epoch=plan.epoch)
    say(address)
    questions, noted = Questions(), [counts(node.stats())]
    while not questions.over:
        if questions.due():
            noted.append(counts(node.stats()))
            if asked := questions.asked():
                say(json.dumps(between(noted, *map(float, asked.split()))))
        if not node.poll():
            node.wait(_PARK)
            node.poll()
    node.close()


def serve_attention(setup: Setup) -> None:
    addresses = json.loads(sys.stdin.readline())
    layout = setup.mailbox_layout()
    end = connect.connect(addresses, attention=setup.index, layout=layout, timeout=60.0)
    link = ExpertLink(end, attention=setup.index, layout=layout, placement=setup.plan())
    ops = open_ops("cpu", setup.threads, isa=setup.isa)
    setup.lend_cores(end, ops)
    decode(setup, build_attention_node(setup.source, setup.engine, link, ops=ops))
    link.close()


def decode(setup: Setup, node: AttentionNode[T]) -> None:
    """All sequences at once, from `go` on; then stays until the others have ended, too."""
    say("ready")
    sys.stdin.readline()
    params = SamplingParams(max_tokens=setup.output_len, temperature=0.0, ignore_eos=True)
    vocabulary = spec_of(setup.source).vocab_size
    for number, ids in enumerate(prompts(vocabulary, setup.batch, setup.prompt_len, setup.index)):
        node.submit(GenerationRequest(number, tuple(ids), params))
    marks = [setup.batch * _WARM_TOKENS, setup.batch * (setup.output_len - _LAST_TOKENS)]
    tokens, questions = 0, Questions()
    while not questions.over:
        if questions.due():
            questions.asked()
        tokens += sum(len(event.token_ids) for event in node.step())
        if marks and tokens >= marks[0]:
            say(json.dumps(counts(node.stats())))
            del marks[0]
        if node.stalled:
            node.wait(_PARK)
        elif not node.busy:
            time.sleep(_LISTEN_SECONDS)


def main(setup: Setup) -> None:
    torch.set_num_threads(1)
    if setup.role == "expert":
        serve_experts(setup)
    elif setup.role == "attention":
        serve_attention(setup)
    else:
        decode(setup, colocated(setup.source, setup.engine))


if __name__ == "__main__":
    main(Setup.read(sys.argv[1]))
