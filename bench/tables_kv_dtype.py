"""Tables of the KV cache in 8 bits and of fidelity, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def fidelity() -> str:
    """A line for each model and what its numbers are kept in."""
    found = newest(rows("fidelity"), "model", "dtype", "experts", "dense", "kv")
    if not found:
        return ""
    return (
        f"**Fidelity** ({_machines(found)}); `python -m bench.fidelity --save`. Teacher-forced, beside transformers in float32 of the same checkpoint: perplexity of the text and its change, the share of positions with the same "
        "most likely token, and the mean Kullback-Leibler divergence in nats. `nano` reads held-out files; tiny models are random and read random tokens, so that only the last two columns say something of them. What failed stands in its line.\n\n"
        + table(
            ["model", "computed in", "experts", "other maps", "KV cache", "perplexity", "change", "same first token", "KL, nats"],
            (_line(row) for row in found),
        )
    )  # fmt: skip


def _machines(found: list[Row]) -> str:
    """Which models were run on which processor."""
    newest_of = {(row["machine"], row["isa"]): row for row in found}
    models = {
        key: dict.fromkeys(row["model"] for row in found if (row["machine"], row["isa"]) == key)
        for key in newest_of
    }
    return "; ".join(
        f"{', '.join(models[key])}: {where(row)}, {row['isa']}" for key, row in newest_of.items()
    )


def _line(row: Row) -> list[object]:
    kept = [row["model"], row["dtype"], row["experts"], row["dense"], row["kv"]]
    if "failed" in row:
        return [*kept, f"failed: {row['failed']}", "", "", ""]
    change = f"{100 * row['perplexity_change']:+.3f} %"
    return [*kept, f"{row['perplexity']:.4f}", change, f"{100 * row['agreement']:.2f} %", f"{row['kl']:.2g}"]


def decode() -> str:
    """A line for each shape, number of sequences and context, a column for each dtype."""
    found = newest(rows("kv_dtype"), "shape", "sequences", "context", "dtype")
    if not found:
        return ""
    lines: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in found:
        lines.setdefault((row["shape"], row["sequences"], row["context"]), {})[row["dtype"]] = row
    return (
        f"**Decode attention over a KV cache in 8 bits** ({where(found[-1])}, {found[-1]['isa']}); `python -m bench.kv_dtype --save`. Milliseconds of the op in bfloat16, and how many times as fast it is in 8 bits: medians of ratios by round, with the least and the most.\n\n"
        + table(
            ["shape", "sequences", "context", "bf16, ms", "int8", "fp8"],
            ([*key, of["bf16"]["ms"], *(_ratio(of.get(name)) for name in ("int8", "fp8"))] for key, of in lines.items()),
        )
    )  # fmt: skip


def _ratio(row: Row | None) -> str:
    return "" if row is None else f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
