"""Tables of the KV cache in 8 bits, of sparse attention and of fidelity, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def fidelity() -> str:
    """A line for each model, what its numbers are kept in, and instruction set."""
    kind = ("model", "dtype", "experts", "dense", "kv")
    first = {tuple(row[key] for key in kind): at for at, row in reversed([*enumerate(rows("fidelity"))])}
    every = newest(rows("fidelity"), *kind, "isa")
    every.sort(key=lambda row: first[tuple(row[key] for key in kind)])
    found = [row for row in every if not row.get("family")]
    if not found:
        return ""
    return (
        f"**Fidelity** ({_machines(found)}); `python -m bench.fidelity --save`. Teacher-forced, beside transformers in float32 of the same checkpoint: perplexity of the text and its change, the share of positions with the same "
        "most likely token, and the mean Kullback-Leibler divergence in nats. `nano` reads held-out files; tiny models are random and read random tokens, so that only the last two columns say something of them. What failed stands in its line.\n\n"
        + table(
            ["model", "computed in", "experts", "other maps", "KV cache", "instructions", "perplexity", "change", "same first token", "KL, nats"],
            (_line(row) for row in found),
        )
        + "".join(
            _families([row for row in every if row.get("family") and row["isa"] == isa])
            for isa in dict.fromkeys(row["isa"] for row in every)
        )
    )  # fmt: skip


def _families(found: list[Row]) -> str:
    """A line for each model type, a column for each format."""
    if not found:
        return ""
    cells: dict[str, dict[str, str]] = {}
    for row in found:
        told = "failed" if "failed" in row else f"{100 * row['agreement']:.1f} %, {row['kl']:.1g}"
        cells.setdefault(row["model"], {})[_kept(row)] = told
    columns = list(dict.fromkeys(map(_kept, found)))
    return (
        f"\n\n**Fidelity by model type** ({where(found[-1])}, {found[-1]['isa']}); `python -m bench.fidelity --families --windows 2 --length 128 --save`. Random checkpoints of tens of thousands of weights with odd widths, random norms and biases, which read random tokens: the share of positions with the same most likely token, and "
        "the divergence in nats. In float32 afserve gives what transformers gives. Fewer bits change much more here than in trained models: logits of random weights lie close together, and so do the scores by which a router or an indexer chooses. So columns of one line can be compared, and lines with each other cannot.\n\n"
        + table(["model type", *columns], ([name, *(of.get(one, "") for one in columns)] for name, of in sorted(cells.items())))
    )  # fmt: skip


def _kept(row: Row) -> str:
    if row["kv"] != "auto":
        return f"KV {row['kv']}"
    if row["experts"] == "auto":
        return str(row["dtype"])
    return f"{row['experts']}, {'experts' if row['dense'] == 'auto' else 'all maps'}"


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
    kept = [row["model"], row["dtype"], row["experts"], row["dense"], row["kv"], row["isa"]]
    if "failed" in row:
        return [*kept, f"failed: {row['failed']}", "", "", ""]
    change = f"{100 * row['perplexity_change']:+.3f} %"
    return [*kept, f"{row['perplexity']:.4f}", change, f"{100 * row['agreement']:.2f} %", f"{row['kl']:.2g}"]


def decode() -> str:
    """For each instruction set and number of threads a line for each shape, number of sequences and context, a column for each dtype."""
    every = newest(rows("kv_dtype"), "isa", "threads", "shape", "sequences", "context", "dtype")
    return "\n\n".join(
        _decoded([row for row in every if (row["isa"], row["threads"]) == of])
        for of in dict.fromkeys((row["isa"], row["threads"]) for row in every)
    )


def _decoded(found: list[Row]) -> str:
    lines: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in found:
        lines.setdefault((row["shape"], row["sequences"], row["context"]), {})[row["dtype"]] = row
    isa, threads = found[-1]["isa"], found[-1]["threads"]
    return (
        f"**Decode attention over a KV cache in 8 bits** ({where(found[-1])}, {isa}, {threads} thread{'s' * (threads > 1)}); `python -m bench.kv_dtype --isa {isa} --threads {threads} --save`. Milliseconds of the op in bfloat16, and how many times as fast it is in 8 bits: medians of ratios by round, with the least and the most.\n\n"
        + table(
            ["shape", "sequences", "context", "bf16, ms", "int8", "fp8"],
            ([*key, of["bf16"]["ms"], *(_ratio(of.get(name)) for name in ("int8", "fp8"))] for key, of in lines.items()),
        )
    )  # fmt: skip


def sparse() -> str:
    """A line for each length of a prompt, instruction set and number of heads."""
    every = ({"heads": 16, "decode_only": False, **row} for row in rows("sparse_attention"))
    whole = (row for row in every if not row.get("near_rows"))
    found = newest(whole, "tokens", "isa", "threads", "heads", "decode_only")
    if not found:
        return ""
    return (
        f"**Sparse attention beside full attention** ({_machines_of(found)}); `python -m bench.sparse_attention --save`, without prompts `--decode-only`. Aims at 32,768 tokens: 0.5 and 0.4. DeepSeek-V3.2's attention with so many heads, 2,048 rows of all by its indexer, and the same attention of all rows, in turns: seconds of a prompt and milliseconds of a token behind it, and what the indexer's take of the others.\n\n"
        + table(
            ["prompt", "instructions", "heads", "layers", "threads", "turns", "prompt, s", "full, s", "of full", "token, ms", "full, ms", "of full"],
            (
                [f"{row['tokens']:,}", row["isa"], row["heads"], row.get("layers", 4), row["threads"], row["turns"], *_prompt(row),
                 f"{1e3 * row['token_s']:.2f}", f"{1e3 * row['token_full_s']:.2f}", f"{row['token_ratio']:.2f}"]
                for row in found
            ),
        )
        + _near()
    )  # fmt: skip


def _near() -> str:
    """A line for each length of a context and instruction set, of rows that are fetched."""
    apart = (row for row in rows("sparse_attention") if row.get("near_rows"))
    found = newest(apart, "tokens", "isa", "threads", "heads", "near_rows", "decode_only")
    if not found:
        return ""
    return (
        f"\n\n**Chosen rows fetched from memory of the host** ({_machines_of(found)}); `python -m bench.sparse_attention --near-rows N --save`, without prompts `--decode-only`. The aim is 1.3. The same model with all rows in the cache beside it, in turns; on a CPU both memories are one, so what is told is the price of looking up, copying and reading elsewhere, and not that of a link. Weights are random, and without a prompt rows are, too: then tokens that follow each other choose less alike. Bytes are of a token over all layers, with four bytes a layer that say where its row is near.\n\n"
        + table(
            ["context", "instructions", "heads", "layers", "threads", "turns", "rows near", "prompt, s", "all in the cache, s", "of that", "found near", "token, ms", "all in the cache, ms", "of that (middle four fifths)", "bytes in fast memory", "in the host", "near rows, MiB"],
            (
                [f"{row['tokens']:,}", row["isa"], row["heads"], row["layers"], row["threads"], row["turns"], f"{row['near_rows']:,}",
                 *_prompt(row, "sparse"), f"{row['found_share']:.0%}", f"{1e3 * row['token_s']:.2f}", f"{1e3 * row['token_sparse_s']:.2f}",
                 f"{row['token_ratio']:.2f} ({row['token_spread'][0]:.2f} to {row['token_spread'][1]:.2f})",
                 f"{row['near_token_bytes']:,}", f"{row['far_token_bytes']:,}", f"{row['near_bytes'] / (1 << 20):.0f}"]
                for row in found
            ),
        )
    )  # fmt: skip


def _prompt(row: Row, other: str = "full") -> list[str]:
    if row["decode_only"]:
        return ["", "", ""]
    return [f"{row['prompt_s']:.1f}", f"{row[f'prompt_{other}_s']:.1f}", f"{row['prompt_ratio']:.2f}"]


def _machines_of(found: list[Row]) -> str:
    """Each instruction set's processor."""
    return "; ".join(f"{isa}: {where(row)}" for isa, row in {row["isa"]: row for row in found}.items())


def _ratio(row: Row | None) -> str:
    return "" if row is None else f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
