"""Ping-pong on a real model: one attention and one expert process, decode with 1, 2, 3 micro-batches, and colocated.

    python -m bench.make_checkpoint --out /path/to/110m
    python -m bench.pipeline_model --model /path/to/110m [--batch 8,32,64] [--json] [--save]

Shares are of the counted period: a bubble is time in which a station had nothing to compute; hidden is the share of the
time that rows were under way during which the attention node computed something else.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from afserve.comm import connect
from afserve.comm.m2n import ExpertLink, ExpertPort
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, layout_for, spec_of
from afserve.engine.expert_node import ExpertNode
from afserve.engine.local import colocated
from afserve.engine.request import GenerationRequest, SamplingParams
from afserve.placement.plan import Placement
from bench.origin import ROOT, origin

FORK = multiprocessing.get_context("fork")
PROMPT, OUTPUT = 64, 64
WARM_TOKENS = 8  # per sequence, before counting


def engine(batch: int, micro_batches: int) -> EngineConfig:
    blocks = batch * (2 + (PROMPT + OUTPUT) // 16) + 16
    return EngineConfig(PROMPT + OUTPUT + 2, blocks, micro_batches=micro_batches, prefix_caching=False)


def plan_of(source: ModelSource) -> Placement:
    spec = spec_of(source)
    return Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=1)


def expert(source: ModelSource, config: EngineConfig, pipe: Connection, stop: Event) -> None:
    spec, plan = spec_of(source), plan_of(source)
    layout = layout_for(source, spec, config, plan.slots_per_node())
    end, address = connect.listen("shm", expert=0, attention_nodes=1, layout=layout)
    node = ExpertNode(ExpertPort(end), build_expert_bank(source, plan.held(0), plan.slots_per_node()))
    pipe.send(address)
    while not stop.is_set():
        if pipe.poll():
            pipe.recv()
            pipe.send(node.stats())
        if not node.poll():
            node.wait(0.02)
    node.close()


def decode(node, batch: int, snapshot) -> tuple[float, int, list]:
    """(seconds, tokens, snapshots before and after) of the steady part."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = tuple((7 * number + 13 * position) % 1000 + 10 for position in range(PROMPT))
        node.submit(GenerationRequest(f"r{number}", prompt, params))
    tokens, marks = 0, []
    counted_from, counted_to = batch * WARM_TOKENS, batch * (OUTPUT - 4)
    while node.busy:
        tokens += sum(len(event.token_ids) for event in node.step())
        if node.stalled:
            node.wait(0.05)
        if (not marks and tokens >= counted_from) or (len(marks) == 1 and tokens >= counted_to):
            marks.append((time.monotonic(), tokens, snapshot()))
    (began, first, before), (ended, last, after) = marks
    return ended - began, last - first, [before, after]


def disaggregated(source: ModelSource, batch: int, micro_batches: int) -> dict[str, object]:
    config, stop = engine(batch, micro_batches), FORK.Event()
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=expert, args=(source, config, theirs, stop), daemon=True)
    process.start()
    theirs.close()
    spec, plan = spec_of(source), plan_of(source)
    layout = layout_for(source, spec, config, plan.slots_per_node())
    end = connect.connect([mine.recv()], attention=0, layout=layout, timeout=60.0)
    link = ExpertLink(end, attention=0, layout=layout, placement=plan)
    node = build_attention_node(source, config, link)

    def snapshot():
        mine.send("stats")
        return node.stats(), mine.recv()

    seconds, tokens, ((a0, f0), (a1, f1)) = decode(node, batch, snapshot)
    stop.set()
    process.join()
    link.close()
    dispatches, calls = a1.dispatches - a0.dispatches, f1.calls - f0.calls
    under_way, parked = a1.under_way_seconds - a0.under_way_seconds, a1.parked_seconds - a0.parked_seconds
    busy, theirs_busy = a1.busy_seconds - a0.busy_seconds, f1.busy_seconds - f0.busy_seconds
    return {
        "mode": "afd",
        "micro_batches": micro_batches,
        "tok_s": round(tokens / seconds, 1),
        "attention_us": round(busy / dispatches * 1e6, 1),
        "expert_us": round(theirs_busy / max(calls, 1) * 1e6, 1),
        "under_way_us": round(under_way / dispatches * 1e6, 1),
        "attention_bubble": round(1 - busy / seconds, 3),
        "expert_bubble": round(1 - theirs_busy / seconds, 3),
        "hidden": round(1 - parked / under_way, 3),
        "hold_us_per_call": round((f1.hold_seconds - f0.hold_seconds) / max(calls, 1) * 1e6, 2),
    }


def together(source: ModelSource, batch: int) -> dict[str, object]:
    seconds, tokens, _ = decode(colocated(source, engine(batch, 1)), batch, lambda: None)
    return {"mode": "colocated", "micro_batches": 1, "tok_s": round(tokens / seconds, 1)}


def isolated(pipe: Connection, work, *args) -> None:
    pipe.send(work(*args))


def in_process(work, *args) -> dict[str, object]:
    """Every measurement starts from a fresh process."""
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=isolated, args=(theirs, work, *args))
    process.start()
    theirs.close()
    try:
        found = mine.recv()
    except EOFError as error:
        raise SystemExit("bench.pipeline_model: a measuring process ended; its reason is above") from error
    process.join()
    return found


def rows(source: ModelSource, batches: list[int]) -> Iterator[dict[str, object]]:
    for batch in batches:
        yield {"batch": batch, **in_process(together, source, batch)}
        for micro_batches in (1, 2, 3):
            yield {"batch": batch, **in_process(disaggregated, source, batch, micro_batches)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline_model", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--batch", default="8,32,64", help="sequences, comma-separated")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help="append to bench/results/pipeline.jsonl")
    options = parser.parse_args()
    source, known = ModelSource(options.model, options.model.rstrip("/").rpartition("/")[2]), origin()
    for row in rows(source, [int(batch) for batch in options.batch.split(",")]):
        print(
            json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()),
            flush=True,
        )
        if options.save:
            with (ROOT / "bench" / "results" / "pipeline.jsonl").open("a") as file:
                file.write(
                    json.dumps({"experiment": "real model", "model": source.name, **row, **known}) + "\n"
                )


if __name__ == "__main__":
    main()
