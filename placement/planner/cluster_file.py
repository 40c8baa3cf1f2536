"""A plan as the cluster TOML that `afserve up --cluster FILE` starts; the format is in configs/clusters/README.md.

Host addresses are unknown to a planner: the file lists one `[[host]]` per machine with a placeholder to edit, or
with this machine's own address where the plan can run on one.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from afserve.config import MAX_MICRO_BATCHES
from afserve.drafts import BESIDE
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.drafting import Drafts
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.plan import Plan, Side

HERE = "127.0.0.1"
_AS_STORED = Precision(kv="bf16")
_HERE = "All on this machine; write other addresses to spread it over hosts."
_ELSEWHERE = "Replace the addresses; one [[host]] is one machine"


def obstacle(plan: Plan) -> str:
    """What `afserve up` cannot start of a plan; "" where it can."""
    afd = plan.kind == "afd"
    if plan.prefill is not None and not afd:
        return "devices that only read prompts have a copy of the experts, and no KV moves from one copy to another"
    if plan.attention.tensor_parallel > 1 or (afd and plan.experts.tensor_parallel > 1):
        return "its nodes span several devices"
    return ""


def on_cpu(hardware: str) -> bool:
    """By its name: every CPU of configs/hardware begins with cpu."""
    return hardware.lower().startswith("cpu")


def cluster_toml(
    plan: Plan,
    model: str,
    chips: Mapping[str, Hardware],
    *,
    path: str = "",
    here: bool = False,
    copies: int = 1,
    ttft: float = float("inf"),
    precision: Precision = _AS_STORED,
) -> str:
    """TOML text. A colocated plan has [experts] nodes = 0: experts run inside the attention processes.

    `chips`: those of the plan, by name. `path`: the checkpoint folder, for a model that has no name. `here`: all of it
    on this machine. `copies` of every expert, the seconds to a first token for which prompts are split, and a
    `precision` that is not the checkpoint's, are flags of `afserve up`, which the file names.
    """
    afd = plan.kind == "afd"
    reading = plan.prefill.devices if plan.prefill else 0
    notes = [
        f"{plan.kind}: about {plan.tok_s:,.0f} tok/s at {plan.tpot * 1e3:.1f} ms per token, +-{plan.error:.0%}",
        _HERE if here else f"{_ELSEWHERE}.",
    ]
    if afd and copies > 1:
        notes.append(f"Start it with --expert-copies {copies}, as it was planned.")
    if plan.prompt_parts > 1:
        notes.append(
            f"Start it with --ttft {ttft:g}: {plan.prompt_parts} prefill nodes read a prompt together then."
        )
    if precision.experts == "int4":
        notes.append("Start it with --expert-dtype int4, as it was planned.")
    if precision.kv == "fp8":
        notes.append("Start it with --kv-dtype fp8, as it was planned.")
    if plan.drafts.tokens:
        notes.append(_drafted(plan.drafts))
    attention = {
        "nodes": plan.ranks + reading,
        "tensor_parallel": plan.attention.tensor_parallel,
        "batch": plan.batch * plan.micro_batches,
    } | ({"prefill": reading} if reading else {})
    lines = _head(
        notes, plan.micro_batches, model, path, attention, {"nodes": plan.experts.devices if afd else 0}
    )
    if plan.prefill is not None and here:
        both = replace(plan.attention, devices=plan.attention.devices + reading)
        lines += _hosts("attention", both, chips, here)
    else:
        lines += _hosts("attention", plan.prefill, chips, here, "prefill") if plan.prefill else []
        lines += _hosts("attention", plan.attention, chips, here)
    if afd:
        lines += _hosts("experts", plan.experts, chips, here)
    return "\n".join(lines) + "\n"


def _drafted(drafts: Drafts) -> str:
    name = drafts.drafter.name
    typed = f"{name}:PATH:{drafts.tokens}" if name in BESIDE else str(drafts)
    return f"Start it with --draft {typed}, as it was planned."


@dataclass(frozen=True, slots=True)
class Phases:
    """Attention nodes by phase over one pool of expert nodes, one node on each device: `prefill`, `decode`, `experts`
    of them, `batch` requests at once on a decode node, `chunk` prompt tokens in a step of a prefill node, `share` of
    the experts' time for prompts at least."""

    prefill: int
    decode: int
    experts: int
    batch: int
    micro_batches: int
    chunk: int
    share: float


def phases_toml(phases: Phases, chip: Hardware, model: str, *, path: str = "", rate: float) -> str:
    """TOML text of what was simulated to serve `rate` requests per second. All on this machine where one host has as
    many devices."""
    nodes = phases.prefill + phases.decode
    here = nodes + phases.experts <= chip.devices
    notes = [
        f"prefill and decode over one pool of experts: {rate:.2f} requests/s inside both targets, simulated",
        f"Prefill nodes had up to {MAX_MICRO_BATCHES} micro-batches there; here all have those of decode nodes.",
        _HERE if here else f"{_ELSEWHERE}. The first attention devices are prefill nodes.",
    ]
    attention = {
        "nodes": nodes,
        "tensor_parallel": 1,
        "batch": phases.batch,
        "prefill": phases.prefill,
        "prefill_tokens": phases.chunk,
    }
    experts = {"nodes": phases.experts, "prompt_share": phases.share}
    lines = _head(notes, phases.micro_batches, model, path, attention, experts)
    for role, devices in (("attention", nodes), ("experts", phases.experts)):
        lines += _hosts(
            role, Side(chip.name, devices, -(-devices // chip.devices), 1), {chip.name: chip}, here
        )
    return "\n".join(lines) + "\n"


def _head(
    notes: Iterable[str],
    micro_batches: int,
    model: str,
    path: str,
    attention: Mapping[str, int],
    experts: Mapping[str, float],
) -> list[str]:
    return [
        *(f"# {note}" for note in notes),
        "",
        f"micro_batches = {micro_batches}",
        "",
        "[model]",
        f"path = {json.dumps(path)}" if path else f"name = {json.dumps(model)}",
        "",
        "[attention]",
        *(f"{name} = {value}" for name, value in attention.items()),
        "",
        "[experts]",
        *(f"{name} = {value}" for name, value in experts.items()),
    ]


def _hosts(role: str, side: Side, chips: Mapping[str, Hardware], here: bool, name: str = "") -> list[str]:
    """`name`: what addresses begin with, where it is not the role. The first attention hosts have the prefill nodes."""
    lines = []
    left = side.devices
    nodes = 1 if here else side.nodes
    for number in range(nodes):
        used = min(left, -(-side.devices // nodes))
        left -= used
        address = HERE if here else f"{name or role}-{number}.example"
        lines += [
            "",
            "[[host]]",
            f'address = "{address}"',
            f'role = "{role}"',
            f'hardware = "{side.hardware}"',
            f"devices = {used}",
            f"memory_gb = {chips[side.hardware].memory / 1e9:g}",
        ]
    return lines
