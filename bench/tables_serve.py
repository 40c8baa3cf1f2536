"""Tables of what goes through HTTP: servers beside `LLM`, load clients beside a script and each other, grammars. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from collections.abc import Callable

from bench.rows import Row, newest, rows, table, where

TIMES = {"ttft": "first token", "gap": "between tokens", "e2e": "whole answer"}


def gateway() -> str:
    found = newest(rows("gateway"), "streams", "attention_nodes", "step_seconds")
    if not found:
        return ""
    lines = [
        [
            row["streams"],
            row["attention_nodes"],
            f"{row['step_seconds'] * 1e3:g} ms" if row["step_seconds"] else "as it reads",
            f"{row['tokens_per_core_second']:,} ({row['low']:,} to {row['high']:,})",
            f"{1e6 / row['tokens_per_core_second']:.1f} us",
            row["mib"],
        ]
        for row in sorted(found, key=lambda r: (r["step_seconds"], r["attention_nodes"], r["streams"]))
    ]
    return (
        f"**One gateway process** with scripted attention nodes ({where(found[-1])}); `python -m bench.gateway --save`. "
        "A core second is a second of the gateway's own CPU time. The aim is 25 us a token at 64 streams.\n\n"
        + table(["streams", "nodes", "a step every", "tokens per core second", "per token", "MiB"], lines)
    )


def served() -> str:
    """Of servers under closed load, with the offline run of the same load."""
    kept = rows("serve")
    found = newest([r for r in kept if r["bench"] == "serve"], "of", "server", "concurrency", "output_len")
    offline = newest([r for r in kept if r["bench"] == "serve_offline"], "of", "concurrency", "output_len")
    if not found:
        return ""
    beside = {(r["of"], r["concurrency"], r["output_len"], r["served_by"]): r for r in offline}
    lines = []
    for r in found:
        alone = beside.get((r["of"], r["concurrency"], r["output_len"], r["server"]))
        lines.append(
            [
                r["of"], r["server"], r["concurrency"], f"{r['input_len']} + {r['output_len']}",
                f"{r['tokens_per_s']:,.0f} ({r['low']:,.0f} to {r['high']:,.0f})",
                f"{r['ttft_ms']['p50']:.1f} ms", f"{r['tpot_ms']['p50']:.2f} ms",
                "" if r.get("listener_us") is None else f"{r['listener_us']:.1f} us",
                "" if alone is None else f"{alone['tokens_per_s']:,.0f}, so {alone['served']:.3f}",
            ]
        )  # fmt: skip
    return (
        f"**Servers under closed load** ({where(found[-1])}); `python -m bench.load --offline --save`. Medians over requests, tokens per second of the "
        "median run; the aim is 0.9 of what `LLM` generates with the same load in the same run.\n\n"
        + table(
            ["model", "server", "streams", "tokens", "tokens/s", "first token", "between tokens", "CPU of its listeners a token", "`LLM` tokens/s"],
            lines,
        )
    )  # fmt: skip


def clients() -> str:
    """Of load clients, where the truth is known and where it is not."""
    return "\n\n".join(part for part in (_of_a_script(), _truth(), _of_one_server()) if part)


def _of_a_script() -> str:
    kept = [r for r in rows("load_clients") if r["bench"] == "load_clients"]
    found = newest(kept, "client", "first", "gap")
    if not found:
        return ""
    lines = [
        [
            r["client"],
            f"{r['first']:g} s, {r['gap'] * 1e3:g} ms",
            *(f"{r['errors'][key]:+.1%}" for key in TIMES),
            _counts(r),
        ]
        for r in found
    ]
    return (
        f"**Load clients beside a scripted server** ({where(found[-1])}); `python -m bench.load_clients --save`. Their medians over the script's delays, of "
        f"{found[-1]['requests']} requests by {found[-1]['streams']} streams. The aim is 5 %: {_met([abs(e) for r in found for e in r['errors'].values()], 0.05)}.\n\n"
        + table(["client", "script: first token, gap", *TIMES.values(), "requests and tokens"], lines)
    )


def _truth() -> str:
    found = newest(
        [r for r in rows("serve") if r["bench"] == "serve_truth"], "first", "gap", "concurrency", "output_len"
    )
    if not found:
        return ""
    names = {"ttft": "first token", "tpot": "between tokens", "e2e": "whole answer"}
    lines = [
        [
            f"{r['first']:g} s, {r['gap'] * 1e3:g} ms",
            r["concurrency"],
            *(f"{r['errors'][key]:+.1%}" for key in names),
            _counts(r),
        ]
        for r in found
    ]
    return (
        f"**`afserve bench serve` beside that script** at several loads ({where(found[-1])}); `python -m bench.load --truth --save`.\n\n"
        + table(["script: first token, gap", "streams", *names.values(), "tokens"], lines)
    )


def _of_one_server() -> str:
    kept = [r for r in rows("load_clients") if r["bench"] == "load_clients_served"]
    found = newest(kept, "client", "of", "up")
    found = [
        r for r in found if (r["of"], r["up"], r["rate"]) == tuple(found[-1][k] for k in ("of", "up", "rate"))
    ]
    if not found:
        return ""
    last = found[-1]
    lines = [
        [
            r["client"],
            *(f"{r['told'][key]:.2f} ms ({r['beside'][key]:+.1%})" for key in TIMES),
            _counts(r),
        ]
        for r in found
    ]
    return (
        f"**Load clients beside one another**, `afserve up {last['up']}` with {last['of']} at {last['share']:.0%} of its capacity: {last['rate']:.1f} requests a second at even "
        f"distances, about {last['prompt']} + {last['tokens']} tokens each ({where(last)}); `python -m bench.load_clients --served --save`. Clients take turns, {last['turns']} of {last['requests']} requests each; "
        "medians, and how far each is from the middle of all. From the lowest to the highest the aim is 10 %: "
        f"{_met(list(last['spread'].values()), 0.10)}. Counts are compared with what the server counted.\n\n"
        + table(["client", *TIMES.values(), "requests and tokens"], lines)
    )


def _counts(row: Row) -> str:
    return "exact" if row["exact"] else "**not exact**"


def _met(values: list[float], aim: float) -> str:
    missed = sum(value > aim for value in values)
    return (
        f"met by all {len(values)}"
        if not missed
        else f"missed by {missed} of {len(values)}, by {max(values):.1%} at most"
    )


def tenants() -> str:
    found = newest(rows("tenants"), "words", "flags")
    if not found:
        return ""
    lines = [
        [
            " ".join(row["flags"]) or "none",
            f"{row['count']:,}",
            *(f"{row['median_ms'][name]:.1f}" for name in ("fresh", "asked", "own")),
            *(f"{row[name]['gap']:.3f} ({100 * row[name]['chance']:.3g} %)" for name in ("asked", "own")),
        ]
        for row in found
    ]
    return (
        f"**Prompts of {found[-1]['words']} words that another key has asked** ({where(found[-1])}); `python -m bench.tenants --record`. Medians of a whole request in milliseconds, and the largest difference of two distributions of times to those of prompts that nobody has asked, "
        "with the chance that two samples of one distribution are so far apart (Kolmogorov and Smirnov). A key's own cached prompts show what a cache that is found would look like.\n\n"
        + table(
            [
                "flags",
                "requests of each kind",
                "nobody's",
                "another key's",
                "its own",
                "another key's, difference",
                "its own, difference",
            ],
            lines,
        )
    )


def grammar() -> str:
    found = newest(rows("grammar"), "of", "drawn", "streams", "threads")
    if not found:
        return ""
    lines = [
        [
            r["of"],
            r["drawn"],
            r["streams"],
            f"{r['free']:,}",
            f"{r['guided']:,}",
            f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})",
        ]
        for r in found
    ]
    return (
        f"**Decoding with a JSON schema** beside the same requests without one, in pairs ({where(found[-1])}); `python -m bench.grammar --save`. Weights are random, so that "
        "hardly any draw follows the schema by itself. The aim is 0.95: "
        + ("met" if min(r["ratio"] for r in found) >= 0.95 else "not met everywhere")
        + ".\n\n"
        + table(["model", "draws", "streams", "tokens/s without", "with", "ratio of a pair"], lines)
    )


def follows() -> str:
    drawn, called = rows("schemas"), rows("tool_calls")
    if not drawn or not called:
        return ""
    lines = [
        [
            f"drawn schemas, {r['kind']}",
            r["schemas"],
            r["refused"],
            f"{r['stopped'] / r['schemas']:.0%}",
            r["stopped"] - r["valid"],
            f"{r['compile_p50_ms']:.1f}, {r['compile_p99_ms']:.1f}",
        ]
        for r in drawn
    ]
    lines += [
        [
            "required calls",
            r["cases"],
            r["refused"],
            f"{r['ended'] / r['cases']:.0%}",
            r["unread"] + r["invalid"],
            "",
        ]
        for r in called
    ]
    return (
        f"**Answers of random weights that follow a schema** ({where(drawn[-1])}); `python -m bench.schemas --save` and `python -m bench.tool_calls --save`. Schemas are made by "
        "hypothesis, rich ones with `$ref`, `anyOf`, `pattern`, bounds and a depth of three; calls are of the Berkeley leaderboard's functions. Ended: within 1,024 tokens. Wrong: ended, "
        "but not valid by jsonschema-rs, or no call.\n\n"
        + table(["asked", "answers", "refused", "ended", "wrong", "compile p50, p99 ms"], lines)
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "A gateway with the attention side scripted": gateway,
    "What is served beside what the engine generates": served,
    "Load clients beside the truth and one another": clients,
    "What grammars cost": grammar,
    "Whether answers follow": follows,
}
