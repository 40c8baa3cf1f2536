"""The table of `bench.lent_cores`: AFD on the two cores of one host, beside the colocated engine. It measures nothing."""

# ruff: noqa: E501  sentences and tables, easier to read unwrapped

from bench.rows import newest, rows, table, where

AIM = 0.85
BATCHES = (32, 64)


def lent() -> str:
    kept = [{"experts": "auto", **r} for r in rows("lent_cores")]
    found = newest(kept, "model", "experts", "batch", "variant")
    if not found:
        return ""
    lines = [
        [
            {"auto": "bf16"}.get(r["experts"], r["experts"]),
            r["batch"],
            r["variant"],
            f"{r['tok_s']:,.0f} ({r['low']:,.0f} to {r['high']:,.0f})",
            f"{r['of_colocated']:.2f}",
            f"{r['period_us']:,.0f}",
            f"{r['of_bound']:.2f}",
            f"{r['not_computed_us']:,.0f}" if "not_computed_us" in r else "",
        ]
        for r in sorted(found, key=lambda r: (r["experts"], r["batch"]))
    ]
    best = [
        min(
            max(r["of_colocated"] for r in of if r["batch"] == batch and "cores lent" in r["variant"])
            for of in (
                [r for r in found if r["experts"] == experts] for experts in {r["experts"] for r in found}
            )
        )
        for batch in BATCHES
    ]
    met = "met" if min(best) >= AIM else "not met"
    return (
        f"**One attention and one expert node on two cores**, which they lend each other or not (`--share-cores`), beside the colocated engine on both ({found[-1]['model']}, medians of "
        f"{min(r['rounds'] for r in found)} rounds or more in turns; {where(found[-1])}); `python -m bench.lent_cores --save`. The bound is both cores busy all the time with the two stages as one thread takes "
        f"them. The aim of {AIM} of colocated at {BATCHES[0]} and {BATCHES[1]} sequences is {met} with cores lent: {best[0]:.2f} and {best[1]:.2f} at least, however experts are kept.\n\n"
        + table(
            [
                "experts",
                "batch",
                "variant",
                "tokens/s",
                "of colocated",
                "us a layer",
                "of the bound",
                "us not computed",
            ],
            lines,
        )
    )
