"""The tables of large models, their starts and those larger than memory, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from statistics import median

from bench.rows import Row, newest, rows, table, where


def large() -> str:
    return "\n\n".join(filter(None, (_starts(), _beyond_memory())))


def _starts() -> str:
    every = [row for row in rows("start") if row["bench"] == "start"]
    last = {
        (row["model"], row["flags"]): row["commit"] for row in every
    }  # a model's rows are of one state of the code
    of_last = [row for row in every if row["commit"] == last[row["model"], row["flags"]]]
    found = newest(of_last, "model", "layers", "from", "flags")
    if not found:
        return ""
    lines = [
        [
            row["model"] + (f", {row['layers']} layers" if row["layers"] else ""),
            f"{row['bytes'] / 1e9:.1f} GB, {row['from']}" if "bytes" in row else row["from"],
            f"{row['ready_s']:.1f} ({row['nano_ready_s']:.1f})",
            f"{row['bytes'] / row['ready_s'] / 1e9:.2f}" if "bytes" in row else "",
            f"{row['disk_gb_s']:.2f}, {row['cache_gb_s']:.2f}" if "bytes" in row else "",
            _memory(row),
            f"{row['together_mib']:,}",
            f"{row['tok_s']:.1f}",
        ]
        for row in found
    ]
    return (
        f"**Start and memory of large models** ({where(found[-1])}); `python -m bench.start --save`. `afserve up` with random weights: made at the start, or "
        "a checkpoint that is read from the disk, and once more with as much of it in the page cache as had room. In brackets the seconds that the bundled "
        "nano takes to ready in the same run. Peak MiB: what only memory can hold, then with pages of mapped files, which the system can drop. tok/s: 32 "
        "greedy tokens after a prompt of 32, the prompt's time included.\n\n"
        + table(
            ["model", "weights", "ready, s (nano)", "GB/s to ready", "plain reads: disk, page cache, GB/s", "peak MiB by node", "all at once", "tok/s"],
            lines,
        )
    )  # fmt: skip


def _memory(row: Row) -> str:
    return ", ".join(
        f"{name} {own:,} ({row['resident_mib'][name]:,})" for name, own in row["own_mib"].items()
    )


def _beyond_memory() -> str:
    every = [row for row in rows("larger_than_memory") if row["kind"] != "twin"]
    if not every:
        return ""
    rounds: dict[tuple[object, ...], list[Row]] = {}
    for row in every:
        sizes = row["model_bytes"], row["streams"], row["prompt"], row["tokens"]
        rounds.setdefault((*sizes, row["machine"], row["kind"], row.get("expert_memory")), []).append(row)
    lines = [
        _round_line([row for row in found if row["commit"] == found[-1]["commit"]])
        for found in rounds.values()
    ]
    return (
        f"**A checkpoint larger than memory** (newest: {where(every[-1])}); `python -m bench.larger_than_memory --save`. Qwen3-30B-A3B's shape with random "
        "weights in bf16, one process, two threads: medians of rounds and their range. afserve keeps experts in so much memory and reads the others past the page cache; llama.cpp maps the "
        "same file, with all memory left for its pages. Read: bytes of a round, of llama.cpp with its start and its warm-up, which its seconds leave out. Of the disk: the rate while anything was read, beside `afserve doctor --io` before and after each round; aim 0.8. "
        "Tokens with a part of the experts in memory equal those with all of them in "
        + ", ".join(f"{row['tokens']} of {row['tokens']}" if row["equal"] else "NOT ALL" for row in rows("larger_than_memory") if row["kind"] == "twin")
        + ".\n\n"
        + table(
            ["model", "machine, load", "engine", "streams, prompt, tokens", "seconds", "read, GB", "GB/s", "of the disk", "found in memory", "most memory, GB"],
            lines,
        )
    )  # fmt: skip


def _of_rounds(values: list[float], digits: int) -> str:
    """The median, and the range of several."""
    middle = f"{median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _round_line(found: list[Row]) -> list[str]:
    first = found[0]
    ours = first["kind"] == "large"
    shares = (("read_rate", 1e9), ("share_of_disk", 1), ("found_in_memory", 1)) if ours else ()
    return [
        f"{first['model_bytes'] / 1e9:.1f} GB",
        f"{first['machine']}, {first['load']}",
        f"afserve, {first['expert_memory']}" if ours else "llama.cpp, mapped",
        f"{first['streams']}, {first['prompt']}, {first['tokens'] // first['streams']}",
        _of_rounds([row["seconds"] for row in found], 1),
        _of_rounds([row["bytes_read"] / 1e9 for row in found], 1),
        *(_of_rounds([row[name] / unit for row in found], 2) for name, unit in shares),
        *([f"{max(row['most_RssAnon'] for row in found) / 1e9:.1f}"] if ours else [""] * 4),
    ]
