"""Tables of drafts, rendered from rows. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import Row, newest, rows, table, where


def draft_price() -> str:
    """A line for each stages, concurrency and acceptance, drafters that know how sure they are behind those that do not."""
    found = rows("draft_price")
    mixes = newest([r for r in found if r["bench"] == "mix"], "stages", "sequences", "acceptance", "informed")
    whole = [r for r in found if r["bench"] == "all mixes"]
    if not mixes or not whole:
        return ""
    lines: dict[tuple[object, ...], list[Row]] = {}
    for row in mixes:
        lines.setdefault((row["stages"], row["sequences"], row["acceptance"]), []).append(row)
    return (
        "**Simulated**: scripted stages of up to four attention nodes and their experts, recorded routing of OLMoE-1B-7B, scripted acceptance, and the policy that serves; nothing is measured of the machine "
        "that plays it; `python -m bench.draft_price --save`. Of each mix the length from 0 to 8 that was best in hindsight, what other lengths reach of it, and the price, which learns acceptance and costs as it goes. Where two figures stand, the first is of a "
        f"drafter that says 0.7 of every token, the second of one whose word says which tokens are likely. {_sum(whole[-1])}\n\n"
        + table(
            ["stages", "sequences", "acceptance", "best length", "no drafts", "length 2", "length 8", "price", "its mean length", "price, own rows only"],
            (_line(key, pair) for key, pair in lines.items()),
        )
    )  # fmt: skip


def _sum(row: Row) -> str:
    return (
        f"Over {row['mixes']} mixes the price is {row['over_best_single']:.2f} times the best single length ({row['best_single_length']}; geometric means), "
        f"{row['over_best_of_mix_mean']:.2f} times the best of each mix in the mean and {row['over_best_of_mix_least']:.3f} at least. "
        f"Knowing the rows that are at the experts, which answers tell, against its own only: {row['pool_over_own_rows_mean']:.3f} in the mean where several nodes share the experts, "
        f"{row['pool_over_own_rows_least']:.2f} to {row['pool_over_own_rows_most']:.2f}."
    )


def _line(key: tuple[object, ...], found: list[Row]) -> list[object]:
    """Lengths that are fixed make the same of the same texts, whatever a drafter says of itself."""
    pair = sorted(found, key=lambda row: bool(row["informed"]))
    fixed = pair[0]["tokens_s_fixed"]

    def shares(name: str) -> str:
        return " / ".join(f"{row[name] / max(row['tokens_s_fixed']):.2f}" for row in pair)

    return [
        *key,
        pair[0]["best_length"],
        *(f"{fixed[length] / max(fixed):.2f}" for length in (0, 2, 8)),
        shares("tokens_s"),
        " / ".join(f"{row['mean_length']:.1f}" for row in pair),
        shares("tokens_s_own_rows"),
    ]


def speed() -> str:
    """A line for each topology, text and number of sequences, a column for each drafter."""
    found = newest(rows("drafts"), "topology", "text", "batch", "draft")
    if not found:
        return ""
    names = list(dict.fromkeys(row["draft"] for row in found if row["draft"] != "off"))
    lines: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in found:
        lines.setdefault((row["topology"], row["text"], row["batch"]), {})[row["draft"]] = row
    return (
        f"**Drafts on the bundled model** ({where(found[-1])}, {found[-1]['isa']}); `python -m bench.drafts --save`, two threads in all. Tokens per second of requests as a whole, "
        "prompts included, in turns in one run; ratios are to the engine without drafts, medians with the least and the most. `code`: beginnings of files that the model was not trained on; `copy`: "
        "answers that go on repeating their prompt; `new`: drawn at temperature 1 behind random tokens, where nothing repeats. A step of this model takes a third of a millisecond, so that what guessing costs weighs "
        "more than anywhere else. The answers of all engines are the same tokens, or the run ends.\n\n"
        + table(
            ["topology", "text", "sequences", "without drafts, tok/s", *names],
            ([*key, f"{of['off']['tokens_per_s']:,}", *(_ratio(of.get(name)) for name in names)] for key, of in lines.items()),
        )
    )  # fmt: skip


def off() -> str:
    """A line for each number of sequences."""
    found = newest(rows("draft_off"), "batch")
    if not found:
        return ""

    def three(row: Row, name: str) -> str:
        return f"{row[name]:.3f} ({row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f})"

    return (
        f"**What the code of drafts costs a run that drafts nothing** ({where(found[-1])}, {found[-1]['isa']}); `python -m bench.draft_off --save`. The bundled model, colocated, one thread, steady decode: the engine beside the same engine from whose "
        "source the lines are taken out that a step has for drafts alone, in turns; and two engines that are the same. Rates by turn as medians with their quarters; 1 costs nothing.\n\n"
        + table(
            ["sequences", "a step, us", "without that code, us", "rate of that without it", "two equal engines"],
            ([row["batch"], row["step_us"], row["step_without_us"], three(row, "ratio"), three(row, "equal")] for row in found),
        )
    )  # fmt: skip


def peers() -> str:
    """A line for each model, numbers, text and number of requests; a column for each program and its drafts."""
    found = newest(rows("draft_peers"), "model", "numbers", "text", "batch", "engine", "draft", "synthetic")
    if not found:
        return ""
    texts = [row for row in found if not row["synthetic"]]
    forced = [row for row in found if row["synthetic"]]
    said = (
        f"**Drafts from texts beside those of others** ({where(found[-1])}, {found[-1]['isa']}); `python -m bench.draft_peers --save`, threads of each: {found[-1]['threads']}, all as servers over HTTP on the same weights, in "
        "turns. Tokens per second of answers whose prompts were read before; each ratio is to the same program without drafts, the median with the least and the most. `same`: answers that are those without drafts. llama.cpp's drafts "
        "are as they come, and told to look for 4 tokens and draft 16.\n\n"
    )  # fmt: skip
    head = [
        "model",
        "numbers",
        "text",
        "requests",
        "program",
        "without, tok/s",
        "drafts: ratio, right of drafted, same",
    ]
    return said + table(head, _beside(texts)) + (f"\n\n{_forced(forced)}" if forced else "")


def _beside(found: list[Row]) -> list[list[object]]:
    lines: dict[tuple[object, ...], list[Row]] = {}
    for row in found:
        key = (row["model"], row["numbers"], row["text"], row["batch"], row["engine"])
        lines.setdefault(key, []).append(row)
    return [
        [*key, f"{of[0]['tokens_per_s']:,}", "; ".join(_won(row) for row in of if row["draft"] != "off")]
        for key, of in lines.items()
    ]


def _won(row: Row) -> str:
    right = (
        f"{row['accepted'] / row['drafted']:.0%} of {row['drafted']:,}" if row["drafted"] else "none drafted"
    )
    same = "" if row["synthetic"] else f", {row['same_answers']:.0%}"
    return f"{row['draft']} {_ratio(row)}, {right}{same}"


def _forced(found: list[Row]) -> str:
    length = found[-1]["synthetic"]
    return (
        f"With **synthetic acceptance** of {length:g} tokens a step where four are drafted: here by suffixes of the same answers, which stay those without drafts; in llama.cpp by pairs of tokens, whose answers are no text then. "
        "vLLM refuses it on CPUs.\n\n"
        + table(["model", "numbers", "text", "requests", "program", "without, tok/s", "drafts: ratio, right of drafted"], _beside(found))
    )  # fmt: skip


def _ratio(row: Row | None) -> str:
    return "" if row is None else f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
