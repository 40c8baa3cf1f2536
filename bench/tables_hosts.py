"""Tables of runs over many hosts, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def members() -> str:
    found = newest(rows("members"), "attention", "experts")
    if not found:
        return ""
    lines = [
        [
            f"{row['attention']:,} + {row['experts']:,}",
            f"{row['ready_s']:.1f}",
            f"{row['cores']:.2f}",
            f"{row['told_s']:.2f}",
            f"{row['moved_s']:.2f}",
            _seconds(row, "loss_cpu_s"),
            _seconds(row, "scripted_cpu_s"),
            f"{row['mib']:,.0f}",
        ]
        for row in found
    ]
    return (
        f"**One controller with scripted nodes** of DeepSeek-V3's shape, 58 MoE layers of 256 experts, two slots per expert node and layer ({where(found[-1])}); "
        "`python -m bench.members --save`. Ready: seconds after the last node had joined.\n\n"
        + table(
            [
                "attention + expert nodes",
                "ready, s",
                "cores at rest",
                "all told of a lost expert node, s",
                "its experts served elsewhere, s",
                "of it the controller computed, s",
                "the scripted nodes, s",
                "MiB",
            ],
            lines,
        )
    )


def _seconds(row: Row, name: str) -> str:
    return f"{row[name]:.2f}" if name in row else "not measured"


def tls() -> str:
    found = newest(rows("tls"), "model", "sequences")
    if not found:
        return ""
    lines = [
        [
            row["model"],
            row["sequences"],
            f"{row['plain_p50_ms']:.3f}",
            f"{row['tls_p50_ms']:.3f}",
            f"{row['over_plain']:.3f} ({row['over_plain_spread'][0]:.3f} to {row['over_plain_spread'][1]:.3f})",
            f"{row['plain_cpu_ms']:.1f}, {row['tls_cpu_ms']:.1f}" if "tls_cpu_ms" in row else "not measured",
        ]
        for row in found
    ]
    return (
        f"**Rows over TLS between two network namespaces**, asked in turns ({where(found[-1])}); `python -m bench.tls --save`. p50 of the time between two tokens; CPU time of all processes per token of each stream.\n\n"
        + table(
            ["model", "sequences", "plain, ms", "TLS, ms", "TLS / plain, pairs", "CPU: plain, TLS, ms"], lines
        )
    )
