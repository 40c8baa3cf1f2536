"""Draws what was started: which node has which layers and experts, memory by role, and the address. Text only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from afserve.kernels.isa import DIFFERENT_ISAS
from afserve.launch.plan.topology import Need, Topology
from afserve.member import AttentionPhase, Role
from afserve.placement.node_room import NODE_OVERHEAD
from afserve.placement.placement import FREE
from afserve.placement.rebalance.copies import copies_in_words

_SHOWN = 4
_LONG = 40  # characters of a list of experts
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StartedModel:
    """`expert_error` is relative, of expert weights that were rounded to fewer bits, `dense_error` the same of all
    other linear maps; each the largest of all nodes. `isas`: the instruction set of each node's kernels on a CPU."""

    topology: Topology
    name: str
    expert_error: float | None = None
    dense_error: float | None = None
    isas: Mapping[str, str] = field(default_factory=dict)


def banner(
    models: Sequence[StartedModel],
    url: str,
    seconds: float,
    serving: Mapping[str, str] = MappingProxyType({}),
) -> RenderableType:
    """`serving` says what HTTP was told: of keys, and where its state is."""
    parts = [part for model in models for part in _about(model)]
    parts += [Text(f"{what}: {how}", style="dim") for what, how in serving.items()]
    parts.append(Text.assemble(("ready", "bold green"), f" in {seconds:.1f} s on ", (url, "bold")))
    return Group(*parts, *(Text(line, style="cyan") for line in examples(url)))


def _about(model: StartedModel) -> list[RenderableType]:
    topology, name, expert_error = model.topology, model.name, model.expert_error
    spec, deployment = topology.spec, topology.deployment
    head = Text.assemble(
        (name, "bold"),
        f"  {spec.family}, {spec.layers} layers, {spec.moe_layers} with {spec.experts} experts (top-{spec.top_k})",
    )
    picture = Table.grid(padding=(0, 1))
    picture.add_row(_attention(topology), _between(topology), _experts(topology))
    lines = [Text(f"{what}: {why}", style="dim") for what, why in topology.picked.items()]
    if model.isas:
        lines.append(instructions(model.isas))
    if not deployment.colocated:
        kept = copies_in_words(deployment.placement, () if topology.seats else topology.expert_hosts)
        lines.append(Text(f"copies: {kept}", style="dim"))
    if expert_error is not None:
        lines.append(
            Text(f"expert weights: rounded to {_kept_in(topology)}, relative error {expert_error:.2g}")
        )
    if model.dense_error is not None:
        kept, error = deployment.engine.dense_dtype, model.dense_error
        lines.append(Text(f"dense weights: rounded to {kept}, relative error {error:.2g}"))
    parts: list[RenderableType] = [head, picture, *lines]
    if deployment.colocated:
        asked = _kept_in(topology)
        kept = f", in {asked}" if asked else ""
        parts.insert(1, Text(f"colocated: every attention node holds all experts{kept}"))
    return parts


def instructions(isas: Mapping[str, str]) -> Text:
    """One set for all nodes, or a warning that names who has which."""
    if len(sets := sorted(set(isas.values()))) == 1:
        return Text(f"instructions: {sets[0]}", style="dim")
    nodes = {isa: ", ".join(node for node, has in isas.items() if has == isa) for isa in sets}
    told = "; ".join(f"{isa} on {names}" for isa, names in nodes.items())
    return Text(f"instructions differ: {told}. {DIFFERENT_ISAS}", style="yellow")


def _kept_in(topology: Topology) -> str:
    """int8 or int4, where that was asked for."""
    asked = topology.deployment.engine.expert_dtype
    return "" if asked == "auto" else asked


def examples(url: str) -> list[str]:
    """Lines to copy. Each fits 80 columns, so that no terminal breaks it."""
    where = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    body = json.dumps({"prompt": "import os"})
    typed = "-H content-type:application/json"
    return [f"afserve chat{where}", f"curl {url}/v1/completions {typed} \\", f"     -d '{body}'"]


def _attention(topology: Topology) -> RenderableType:
    layers = f"layers 0-{topology.spec.layers - 1}: attention, routers, LM head"
    body = f"{layers}\nKV cache {topology.kv_tokens_of_node:,} tokens\n{memory(topology.attention)}"
    deployment = topology.deployment
    nodes = [node for node in deployment.nodes if node.role is Role.ATTENTION]
    return _boxes([(_in_phase(str(node), deployment.phase(node.index)), body) for node in nodes])


def _in_phase(name: str, phase: AttentionPhase) -> str:
    return name if phase is AttentionPhase.BOTH else f"{name}, {phase}"


def _experts(topology: Topology) -> RenderableType:
    if topology.expert is None:
        return Text()
    placement = topology.deployment.placement
    names = []
    for node in topology.deployment.nodes:
        if node.role is not Role.EXPERT:
            continue
        held = sorted({e for layer in placement.layers for e in layer.slots[node.index] if e != FREE})
        ids = topology.spec.moe_layer_ids
        asked = _kept_in(topology)
        kept = f"{asked} " if asked else ""
        which = ranges(held)
        if len(which) > _LONG:
            which = f"{which[:_LONG].rpartition(',')[0]}, ... ({len(held)} of {topology.spec.experts})"
        body = f"layers {ids[0]}-{ids[-1]}: experts {which}\n{memory(topology.expert, kept)}"
        names.append((str(node), body))
    return _boxes(names)


def _between(topology: Topology) -> RenderableType:
    if topology.expert is None:
        return Text()
    engine = topology.deployment.engine
    count = f"1-{engine.micro_batches}" if engine.adaptive else str(engine.micro_batches)
    rows = "\nrows in fp8" if engine.wire_dtype == "fp8" else ""
    return Text(f"\n── dispatch ─▶\n◀─ combine ───\n{topology.deployment.transport}, m = {count}{rows}")


def _boxes(nodes: Sequence[tuple[str, str]]) -> RenderableType:
    shown: list[RenderableType] = [
        Panel(body, title=name, title_align="left", expand=False) for name, body in nodes[:_SHOWN]
    ]
    if len(nodes) > _SHOWN:
        shown.append(Text(f"and {len(nodes) - _SHOWN} more like these"))
    return Group(*shown)


def memory(need: Need, kind: str = "") -> str:
    kv = f" + {_size(need.kv)} KV" if need.kv else ""
    kernels = f", {_size(need.kernels)} for its kernels" if need.kernels else ""
    return f"{_size(need.weights)} {kind}weights{kv}\n{_size(NODE_OVERHEAD)} for its process{kernels}"


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][-1:] = [number] if len(runs[-1]) > 1 else [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _size(size: float) -> str:
    return f"{size / _MIB:,.0f} MiB" if size < 4096 * _MIB else f"{size / (1 << 30):,.1f} GiB"
