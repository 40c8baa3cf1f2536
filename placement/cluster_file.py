"""A plan as the cluster TOML that `afserve up --cluster FILE` starts; the format is in configs/clusters/README.md.

Host addresses are unknown to a planner: the file lists one `[[host]]` per node with a placeholder to edit.
"""

from afserve.placement.outline import Plan, Side


def cluster_toml(plan: Plan, model: str) -> str:
    """TOML text. A colocated plan has [experts] nodes = 0: experts run inside the attention processes."""
    afd = plan.kind == "afd"
    lines = [
        f"# {plan.kind}: about {plan.tok_s:,.0f} tok/s at {plan.tpot * 1e3:.1f} ms per token, +-{plan.error:.0%}",
        "# Replace the addresses; one [[host]] is one machine.",
        "",
        f"micro_batches = {plan.micro_batches}",
        "",
        "[model]",
        f'name = "{model}"',
        "",
        "[attention]",
        f"nodes = {plan.ranks}",
        f"tensor_parallel = {plan.attention.tensor_parallel}",
        f"batch = {plan.batch * plan.micro_batches}",
        "",
        "[experts]",
        f"nodes = {plan.experts.devices if afd else 0}",
    ]
    lines += _hosts("attention", plan.attention)
    if afd:
        lines += _hosts("experts", plan.experts)
    return "\n".join(lines) + "\n"


def _hosts(role: str, side: Side) -> list[str]:
    lines = []
    left = side.devices
    for number in range(side.nodes):
        here = min(left, -(-side.devices // side.nodes))
        left -= here
        lines += [
            "",
            "[[host]]",
            f'address = "{role}-{number}.example"',
            f'role = "{role}"',
            f'hardware = "{side.hardware}"',
            f"devices = {here}",
        ]
    return lines
