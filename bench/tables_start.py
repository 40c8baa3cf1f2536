"""The table of starts of large models, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def large() -> str:
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
