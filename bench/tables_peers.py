"""The tables of `bench.peers`, engines beside each other, one for each checkpoint; those of `bench.kt_kernel` and `bench.arm_counts`."""

# ruff: noqa: E501  sentences, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def peers() -> str:
    return _beside(
        "The engine beside its peers",
        [row for row in rows("peers") if row.get("experts", "auto") == "auto"],
        'By default vLLM keeps one core for its front end; the row "on all cores" lets it compute on all of them. The two nodes of afd 1x1 lend each other their cores, but for the table of qwen110m.',
    )


def peers_in_few_bits() -> str:
    return _beside(
        "In few bits beside its peers",
        [row for row in rows("peers") if row.get("experts", "auto") != "auto"],
        'afserve keeps routed experts in int8 or int4 and all else in bf16, or in what a row calls "dense"; llama.cpp keeps every matrix in what its row says. The two nodes of afd 1x1 lent no cores in these runs.',
    )


def _beside(title: str, measured: list[Row], note: str) -> str:
    unnamed = {
        "experts": "auto",
        "dense": "auto",
        "isa": "",
        "llama_isa": "",
    }  # rows of before these had names
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in ({**unnamed, **row} for row in measured):
        case = (row["model"], row["experts"], row["dense"], row["isa"], row["llama_isa"])
        cases.setdefault(case, []).append(row)
    found = [newest(_of_last_run(of), "engine", "phase", "batch", "prompt_len") for of in cases.values()]
    return "\n\n".join(
        f"{_says(title, note if i == 0 else '', of)}\n\n{_tables(of)}" for i, of in enumerate(found)
    )


def _of_last_run(found: list[Row]) -> list[Row]:
    """A machine's speed changes from one run to the next, so a table has rows of one commit. Rows that a run has saved
    make its own tree dirty."""
    last = found[-1]["commit"].removesuffix("-dirty")
    return [row for row in found if row["commit"].removesuffix("-dirty") == last]


def _says(title: str, note: str, found: list[Row]) -> str:
    first = next((row for row in found if not _prompt(row)), found[0])
    said = (
        f"**{title}** ({first['model']}, prompt {first['prompt_len']}, output {first['output_len']}, "
        f"{first['threads']} threads in all, medians of {first['rounds']} rounds in turn; {where(first)}). Generated "
        "tokens per second by batch; `python -m bench.peers`."
    )
    if first["isa"]:
        said += f" afserve computed with {first['isa']}"
        said += f", llama.cpp was built for {first['llama_isa']}." if first["llama_isa"] else "."
    if any(map(_prompt, found)):
        said += " Under a prompt's length: its tokens per second until the first token, one prompt at a time."
    return f"{said} {note}".rstrip()


def _tables(found: list[Row]) -> str:
    columns = sorted({(_prompt(row), row["batch"]) for row in found})
    heads = [f"prompt {prompt:,}" if prompt else str(batch) for prompt, batch in columns]
    by = {(row["engine"], _prompt(row), row["batch"]): row for row in found}
    engines = list(dict.fromkeys(row["engine"] for row in found))
    lines = [
        [
            engine,
            *(f"{by[engine, *c]['tokens_per_second']:,.0f}" if (engine, *c) in by else "" for c in columns),
        ]
        for engine in engines
    ]
    ratios = [
        [f"{engine} / {other}", *(_ratio(by.get((engine, *c)), other) for c in columns)]
        for engine in engines
        for other in engines
        if any(_ratio(by.get((engine, *c)), other) for c in columns)
    ]
    return table(["engine", *heads], lines) + "\n\n" + table(["ratio, by round", *heads], ratios)


def _prompt(row: Row) -> int:
    """Tokens of a prompt that is prefilled alone, 0 for a row of decoding."""
    return int(row["prompt_len"]) if row.get("phase") == "prefill" else 0


def _ratio(row: Row | None, other: str) -> str:
    """Empty where the two were not measured in one run."""
    return f"{row['ratio'][other]:.2f}" if row is not None and other in row["ratio"] else ""


def experts() -> str:
    found = newest(rows("kt_kernel"), "shape", "form", "rows", "threads", "isa")
    if not found:
        return ""
    counts = sorted({int(row["rows"]) for row in found})
    by = {(*_case_of(row), int(row["rows"])): row for row in found}
    cases = list(dict.fromkeys(_case_of(row) for row in found))
    lines = [[*case, *(_beside_theirs(by.get((*case, count))) for count in counts)] for case in cases]
    last = found[-1]
    return (
        f"**The expert FFN beside {last['peer']}** (medians of {last['rounds']} rounds in turn; {where(last)}). Microseconds of one "
        "layer's routed experts, afserve's / theirs = how many times as fast, and the range over rounds, by rows that come together; "
        "`python -m bench.kt_kernel`. DeepSeek-V3 has 32 of its 256 experts. `int4` and `mxfp4`: groups of 32, the same codes; `int4 rows`: "
        "theirs has a scale for each output, ours for 32 inputs. Theirs runs with as many workers as ours has threads and with one fewer, "
        "since its caller loops too; the faster counts, * where that was one fewer.\n\n"
        + table(
            ["shape", "kept in", "threads", "instructions", "theirs", *(str(count) for count in counts)],
            lines,
        )
    )


def arm() -> str:
    found = newest(rows("arm_counts"), "weights", "set", "rows")
    if not found:
        return ""
    sets, counts = (list(dict.fromkeys(row[key] for row in found)) for key in ("set", "rows"))
    by = {(row["weights"], row["set"], row["rows"]): row for row in found}
    kinds = dict.fromkeys(row["weights"] for row in found)
    lines = [[kind, *(_counted(by.get((kind, name, n))) for n in counts for name in sets)] for kind in kinds]
    peers = sorted({row["peer"] for row in found if "peer" in row})
    more = [row for row in found if row["instructions"] > row.get("peer_instructions", row["instructions"])]
    worst = (
        "No loop of decode here takes more than theirs"
        if not more
        else "More than theirs take " + ", ".join(f"{row['weights']} with {row['set']}" for row in more)
    )
    last = found[-1]
    return (
        f"**Instructions for each byte of weights**, scales aside, of a product with a panel of 64 columns: afserve / {' and '.join(peers)}, whose loops are those that it takes on the same processor. "
        f"{last['compiler']}, -O3, counted in {last['emulator']}, {last['date'][:10]}; nothing was run for its speed. `python -m bench.arm_counts --llama SOURCE --save`. {worst}.\n\n"
        + table(
            [
                "weights",
                *(f"{name}, {n} {'row' if n == 1 else 'rows'}" for n in counts for name in sets),
            ],
            lines,
        )
    )


def _counted(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['instructions']:.3f}" + (
        f" / {row['peer_instructions']:.3f}" if "peer_instructions" in row else ""
    )


def _case_of(row: Row) -> tuple[str, str, int, str, str]:
    return row["shape"], row["form"], row["threads"], row["isa"], row["peer_isa"]


def _beside_theirs(row: Row | None) -> str:
    if row is None:
        return ""
    spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
    fewer = "*" if row.get("peer_threads", row["threads"]) < row["threads"] else ""
    return f"{row['us']:,.0f} / {row['peer_us']:,.0f}{fewer} = {row['ratio']:.2f} ({spread})"
