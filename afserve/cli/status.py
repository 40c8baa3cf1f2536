"""`afserve status`: the members of a running server, as a table or as JSON."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from afserve.cli.connection import connect, model_option, server_options
from afserve.control.wire.view_values import IN_TIME

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Fields = Mapping[str, Any]  # parsed JSON
_INCIDENTS = 20
COLUMNS = ("node", "state", "pid", "MiB", "seen", "running", "waiting", "KV", "tokens", "rows", "busy")


@click.command()
@server_options
@model_option
@click.option("--json", "as_json", is_flag=True, help="The server's own answer, unchanged; a line per model.")
def status(url: str, api_key_file: str | None, model: str | None, as_json: bool) -> None:
    """Members, load and memory of a running server: of each of its models, or of --model."""
    for answer in _answers(url, api_key_file, model):
        if as_json:
            click.echo(json.dumps(answer))
        else:
            _print(answer)


def _answers(url: str, api_key_file: str | None, model: str | None) -> Iterator[Fields]:
    """Of one model each."""
    with connect(url, api_key_file, model) as client:
        first: Fields = client.status()
    yield first
    for name in () if model is not None else first["models"][1:]:
        with connect(url, api_key_file, name) as client:
            yield client.status()


def _print(answer: Fields) -> None:
    from rich.console import Console

    console = Console()
    console.print(table(answer, console.width))
    for line in missing_lines(answer):
        say(console, line, "bold")
    for lines in (
        placement_lines,
        pilot_lines,
        phase_lines,
        draft_lines,
        kv_lines,
        tier_lines,
        expert_lines,
        incident_lines,
    ):
        for line in lines(answer):
            say(console, line, "dim")


def say(console: "Console", line: str, style: str) -> None:
    """Broken between words where a terminal is narrower, further lines set in; whole in a pipe."""
    if console.is_terminal:
        depth = len(line) - len(line.lstrip()) + 2
        line = textwrap.fill(line, console.width, subsequent_indent=" " * depth, break_on_hyphens=False)
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def missing_lines(answer: Fields) -> list[str]:
    """Nodes that are gone, each with its reason, and what new requests are refused for."""
    refusing = answer["refusing"]
    late = ", ".join(f"{count:,} for {why}" for why, count in sorted(answer["refused"].items()))
    return [
        *answer["absent"],
        *([f"new requests are refused: {refusing}"] if refusing else []),
        *([f"refused as they would have been too late: {late}"] if late else []),
    ]


def placement_lines(answer: Fields) -> list[str]:
    """Balance per layer and the last decisions, in words."""
    balance: list[float] = answer["balance"]
    lines = []
    if balance:
        each = " ".join(f"{value:.2f}" for value in balance)
        mean = sum(balance) / len(balance)
        lines.append(
            f"expert nodes, fullest over mean by layer: {each} (mean {mean:.2f}, worst {max(balance):.2f})"
        )
    return lines + [f"  {decision}" for decision in answer["decisions"]]


def pilot_lines(answer: Fields) -> list[str]:
    """What a pilot advised and what came of it, where there is one."""
    pilot = answer.get("pilot")
    if not pilot:
        return []
    counts, figures = pilot["counts"], pilot["figures"]
    right = f", {counts['held']} of {counts['compared']} as expected" if counts.get("compared") else ""
    head = (
        f"pilot ({pilot['mode']}): {figures.get('rate', 0.0):.3g} requests/s now, at most "
        f"{figures.get('rate_soon', 0.0):.3g} soon; {counts.get('advised', 0)} advices, {counts.get('acted', 0)} done"
        f"{right}"
    )
    kept = [
        f"{name.removeprefix(IN_TIME)} {share:.1%}"
        for name, share in figures.items()
        if name.startswith(IN_TIME)
    ]
    classes = [f"  in time: {', '.join(kept)}"] if kept else []
    return [head, *classes, *(f"  {line}" for line in (*pilot["advices"], *pilot["outcomes"]))]


def incident_lines(answer: Fields, most: int = _INCIDENTS) -> list[str]:
    """What the deployment went through, the last ones, oldest first, and what it has cost in all."""
    last = answer["incidents"][-most:]
    if not last:
        return []
    lost = sum(sum(causes.values()) for causes in answer["lost"].values())
    head = (
        f"since the start: {lost} nodes lost, {sum(answer['moved'].values()):,} requests moved, "
        f"{answer['resent_rows']:,} rows sent again, {answer['reloaded_bytes'] / 1e6:,.1f} MB of experts reloaded"
    )
    return [head, *(f"  {clock_time(each['at'])} {each['text']}" for each in last)]


def phase_lines(answer: Fields) -> list[str]:
    """The queues of phases, where there is more than one, and who kept to the times that were asked for."""
    phases, goodput = answer["phases"], answer["goodput"]
    queues = [
        f"{phase}: {of['nodes']:,} node{'s' * (of['nodes'] != 1)}, {of['running']:,} running, "
        f"{of['waiting']:,} waiting, {of['queued_tokens']:,} prompt tokens queued"
        for phase, of in phases.items()
        if len(phases) > 1
    ]
    judged = {"prefill": "first tokens", "decode": "answers"}
    kept = [
        f"{phase} on time: {of['on_time'] / (of['on_time'] + of['late']):.1%} of {of['on_time'] + of['late']:,} "
        f"{judged[phase]}, {of['tokens']:,} tokens"
        for phase, of in goodput.items()
    ]
    return queues + kept


def draft_lines(answer: Fields, before: Fields | None = None) -> list[str]:
    """What drafts gave, where there were any: since the start, or since `before`."""
    now, then = _drafts(answer), _drafts(before) if before else {}
    gone = {drafter: _less(of, then.get(drafter)) for drafter, of in now.items()}
    return [
        f"{drafter} drafts: {1 + of['accepted'] / of['drafts']:.2f} tokens a step, {of['accepted']:,} of "
        f"{of['tokens']:,} drafted tokens right"
        for drafter, of in gone.items()
        if of["drafts"] > 0
    ]


def _drafts(answer: Fields) -> dict[str, dict[str, int]]:
    """Counts by drafter, of all attention nodes."""
    found: dict[str, dict[str, int]] = {}
    for node in answer["nodes"]:
        if node["role"] == "attention" and node["stats"]:
            for drafter, counts in node["stats"]["drafts"]["drafters"].items():
                total = found.setdefault(drafter, dict.fromkeys(counts, 0))
                for name, count in counts.items():
                    total[name] += count
    return found


def _less(now: dict[str, int], then: dict[str, int] | None) -> dict[str, int]:
    return now if then is None else {name: count - then[name] for name, count in now.items()}


def kv_lines(answer: Fields) -> list[str]:
    """KV blocks that moved between attention nodes, if any did."""
    found = [node["stats"]["kv"] for node in answer["nodes"] if node["role"] == "attention" and node["stats"]]
    total = {name: sum(kv[name] for kv in found) for name in (found[0] if found else ())}
    if not (total and (total["bytes_received"] or total["pulls"])):
        return []
    return [
        *_handed(total),
        f"KV: {total['bytes_received'] / 1e6:,.1f} MB moved between attention nodes, {total['pulls']:,} requests "
        f"brought theirs along ({total['pulls_failed']:,} in part), {total['copied_blocks']:,} blocks copied, "
        f"{total['copies']:,} copies held, {total['leased']:,} blocks leased"
        + (f", the first for {max(kv['oldest_lease'] for kv in found):.1f} s" if total["leased"] else ""),
    ]


def _handed(kv: Fields) -> list[str]:
    """What prefill nodes did for decode nodes, if they did anything."""
    if not (kv["handed"] or kv["straight"]):
        return []
    mean = 1e3 * kv["hand_seconds"] / max(1, kv["handed"])
    return [
        f"prompts: {kv['handed']:,} handed over by prefill nodes ({kv['handed_short']:,} in part), {mean:,.1f} ms each "
        f"from the request to the last block; {kv['straight']:,} computed by a decode node as that was sooner"
        + (
            f"; {kv['split']:,} split over prefill nodes ({kv['split_short']:,} in part)"
            if kv["split"]
            else ""
        )
    ]


def tier_lines(answer: Fields) -> list[str]:
    """Where prompts' KV was found, if any was; and KV blocks in the host memory and on the disks of attention nodes, if
    any node has such a tier."""
    found = [n["stats"]["tiers"] for n in answer["nodes"] if n["role"] == "attention" and n["stats"]]
    rows = [n["stats"]["near"] for n in answer["nodes"] if n["role"] == "attention" and n["stats"]]
    return [
        *_hits(answer["kv_hits"]),
        *_chosen(rows),
        *_in_host_memory([tiers["host"] for tiers in found]),
        *_on_disk(found),
    ]


def expert_lines(answer: Fields) -> list[str]:
    """What memory for some of the experts serves, and whether traffic has a hot set."""
    found = [node["stats"]["experts"] for node in answer["nodes"] if node["stats"]]
    total = {name: sum(one[name] for one in found) for name in (found[0] if found else ())}
    if not (total and total["capacity"]):
        return []
    uses = total["hits"] + total["misses"] + total["in_host"]
    moved = _moved("read", total["bytes_read"], total["read_seconds"])
    if total["bytes_copied"]:
        moved += _moved("copied from the host", total["bytes_copied"], total["copy_seconds"])
    return [
        f"experts in memory: {total['resident']:,} of {total['capacity']:,} that fit, "
        f"{total['hits'] / max(1, uses):.1%} of {uses:,} uses found there, "
        f"{moved}{total['ahead_used']:,} of {total['read_ahead']:,} read ahead were used, "
        f"{total['unreadable']:,} unreadable",
        answer["hot_set"],
    ]


def _moved(how: str, size: int, seconds: float) -> str:
    rate = f" at {size / seconds / 1e9:.2f} GB/s" if seconds else ""
    return f"{size / 1e9:,.1f} GB {how}{rate}, "


def _chosen(rows: Sequence[Fields]) -> list[str]:
    near, fetched = (sum(one[name] for one in rows) for name in ("found", "fetched"))
    if not fetched:
        return []
    return [f"rows that an indexer chose: {near / (near + fetched):.1%} of {near + fetched:,} were near"]


def _hits(tokens: Mapping[str, int]) -> list[str]:
    where = (
        f"{tokens[tier]:,} {place}"
        for tier, place in (
            ("memory", "in the cache"),
            ("peer", "at other nodes"),
            ("host", "in host memory"),
            ("disk", "on disk"),
        )
        if tokens.get(tier)
    )
    return [f"prompt tokens whose KV was found: {', '.join(where)}"] if any(tokens.values()) else []


def _in_host_memory(found: Sequence[Fields]) -> list[str]:
    total = {name: sum(host[name] for host in found) for name in (found[0] if found else ())}
    if not (total and total["capacity"]):
        return []
    return [
        f"KV in host memory: {total['blocks']:,} of {total['capacity']:,} blocks, {total['bytes_read'] / 1e6:,.1f} MB "
        f"read, {total['bytes_written'] / 1e6:,.1f} MB written, {total['left']:,} made room for others, "
        f"{total['damaged']:,} damaged"
    ]


def _on_disk(found: Sequence[Fields]) -> list[str]:
    total = {name: sum(t[name] for t in found) for name in (found[0] if found else ()) if name != "host"}
    if not (total and total["capacity"]):
        return []
    lost = ("damaged", "unreadable", "overwritten", "late", "refused")
    dropped = ", ".join(f"{total[why]:,} {why}" for why in lost if total[why]) or "none"
    return [
        f"KV on disk: {total['blocks']:,} of {total['capacity']:,} blocks, {total['bytes_read'] / 1e6:,.1f} MB read, "
        f"{total['bytes_written'] / 1e6:,.1f} MB written, blocks dropped: {dropped}"
    ]


def clock_time(at: float) -> str:
    """Unix seconds as this machine's time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def table(answer: Fields, width: int) -> "RenderableType":
    """What rich prints; cells of the other role stay empty."""
    from afserve.cli.columns import drawn

    state = "ready" if answer["ready"] else "not ready"
    title = (
        f"{answer['model']['id']}  {state}, placement epoch {answer['epoch']}, afserve {answer['version']}"
    )
    sets = sorted({node["isa"] for node in answer["nodes"] if node.get("isa")})
    title += f", {' and '.join(sets)} instructions" if sets else ""
    return drawn(title, COLUMNS, [row(node) for node in answer["nodes"]], width, left=("node", "state"))


def _state(node: Fields) -> str:
    """With the phase of an attention node that does not do both."""
    phase = node.get("phase")
    return f"{node['state']}, {phase}" if phase in ("prefill", "decode") else str(node["state"])


def row(node: Fields) -> Sequence[str]:
    """Cells in the order of COLUMNS."""
    stats = node["stats"]
    common = (
        node["name"],
        _state(node),
        str(node["pid"]),
        f"{node['resident_bytes'] / (1 << 20):,.0f}",
        f"{node['heartbeat_age']:.1f} s",
    )
    if stats is None:  # a gateway counts in /metrics
        return (*common, *("",) * 6)
    if node["role"] == "attention":
        use = stats["kv_blocks_used"] / stats["kv_blocks"] if stats["kv_blocks"] else 0.0
        counts = (stats["running"], stats["waiting"], f"{use:.0%}", stats["generated_tokens"])
        return (*common, *map(str, counts), "", "")
    return (*common, "", "", "", "", f"{stats['rows']:,}", f"{stats['busy_seconds']:.1f} s")
