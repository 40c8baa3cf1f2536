"""What `--draft`, `--acceptance` and `--domain` say, and what a plan says of drafts: whether they pay, with and without
them side by side."""

from afserve.cli.plan.catalog import load_lengths
from afserve.drafts import DRAFT_TOKENS, DraftChoice, token_count
from afserve.errors import ConfigError, shown
from afserve.families.drafters.dense import draft_model_spec
from afserve.placement.planner.draft_worth import DraftWorth
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.interval import WITHIN_80
from afserve.placement.planner.perf.acceptance import OTHER, Accepted, expected_lengths, typed_lengths
from afserve.placement.planner.perf.drafting import (
    DRAFTERS,
    MODEL,
    NO_DRAFTS,
    DrafterCosts,
    Drafts,
    model_drafter,
)
from afserve.placement.planner.perf.shape import ModelShape

_AUTO, _OFF = "auto", "off"


def draftable_of(
    draft: str, acceptance: str | None, domain: str | None, shape: ModelShape
) -> tuple[Drafts, ...]:
    """The one that was asked for, or none and 1, 2 ... tokens where each plan takes the best of them. Raises
    ConfigError naming the flag."""
    method, colon, count = draft.partition(":")
    if method not in (_AUTO, _OFF, MODEL, *DRAFTERS):
        known = ", ".join((_OFF, _AUTO, *DRAFTERS, MODEL))
        raise ConfigError(
            f"--draft: {shown(method)} is not one of {known}; write METHOD:N, such as mtp:3", param="draft"
        )
    if colon and method in (_AUTO, _OFF):
        raise ConfigError(f"--draft: {method} takes no number; leave out {shown(':' + count)}", param="draft")
    if method == _OFF:
        for flag, value in (("acceptance", acceptance), ("domain", domain)):
            if value is not None:
                raise ConfigError(
                    f"--{flag} is of drafts, and none were asked for; add --draft mtp:3", param=flag
                )
        return (NO_DRAFTS,)
    if acceptance is not None and domain is not None:
        raise ConfigError(
            "--domain: --acceptance says already what is accepted; drop one of them", param="domain"
        )
    if method == MODEL:
        choice = DraftChoice.parse(draft)
        drafter, tokens = model_drafter(draft_model_spec(choice.folder), choice.folder), choice.tokens
    else:
        drafter = _drafter(method, shape)
        tokens = token_count(count, "--draft", "METHOD:N, such as mtp:3") if colon else None
    accepted = _accepted(drafter, acceptance, domain or OTHER, shape)
    if tokens is not None:
        return (accepted.drafts(tokens),)
    return (NO_DRAFTS, *(accepted.drafts(tokens) for tokens in range(1, len(accepted.lengths) + 1)))


def _drafter(method: str, shape: ModelShape) -> DrafterCosts:
    if method == _AUTO:
        return DRAFTERS["mtp" if shape.mtp_layers else "eagle3"]
    drafter = DRAFTERS[method]
    if drafter.routed and not shape.mtp_layers:
        raise ConfigError(
            f"--draft {method}: {shape.name} has no MTP layer, by num_nextn_predict_layers of its config.json; draft "
            "with eagle3, dflash, dspark, ngram or suffix",
            param="draft",
        )
    return drafter


def _accepted(drafter: DrafterCosts, typed: str | None, domain: str, shape: ModelShape) -> Accepted:
    if typed is not None:
        return typed_lengths(typed, drafter, int(DRAFT_TOKENS.high))
    found = expected_lengths(load_lengths(), shape.rows_name, drafter, domain)
    if found is None:
        raise ConfigError(
            f"--draft {drafter.name}: how much is accepted hangs on the text and who drafts, and nobody published it; "
            "add --acceptance, such as 0.6 (accepted over drafted tokens of a server that runs)",
            param="acceptance",
        )
    return found


def draft_lines(worth: DraftWorth | None) -> list[str]:
    """Whether drafts pay, and the plans without them; nothing where none were asked for."""
    if worth is None:
        return []
    drafts, without = worth.drafts, worth.without.best()
    low, high = (drafts.further(far) for far in (-WITHIN_80, WITHIN_80))
    lines = [
        f"{drafts}: {drafts.length:.2f} tokens a step, {low:.2f} to {high:.2f} for 80 %; {drafts.source}",
        draft_verdict(worth),
    ]
    if without is None:
        return [*lines, "Without drafts nothing meets the targets in these pools."]
    return [
        *lines,
        f"Without drafts: {describe(without)}, TPOT {without.tpot * 1e3:.1f} ms, {without.tok_s_per_device:,.0f} "
        f"tok/s/dev, ${without.usd_per_mtok:.3f}/Mtok. {worth.verdict}",
    ]


def draft_verdict(worth: DraftWorth) -> str:
    """In words."""
    words = f"{worth.gain:.2f}x at this batch ({worth.low:.2f}x to {worth.high:.2f}x)"
    if worth.gain <= 1:
        said = f"Drafts do not pay: {words}"
    elif worth.low <= 1:
        said = f"Drafts pay in the mean: {words}"
    else:
        said = f"Drafts pay: {words}"
    if worth.pays_up_to is None:
        return f"{said}, and at every batch that fits."
    if worth.pays_up_to == 0:
        return f"{said}, and at no batch of this layout."
    return f"{said}; do not draft beyond batch {worth.pays_up_to:,}."


def draft_values(worth: DraftWorth | None) -> dict[str, object]:
    """The `drafts` of --json, where any were asked for."""
    if worth is None:
        return {}
    without = worth.without.best()
    return {
        "drafts": {
            "drafter": worth.drafts.drafter.name,
            "tokens": worth.drafts.tokens,
            "tokens_per_step": round(worth.drafts.length, 3),
            "source": worth.drafts.source,
            "gain": round(worth.gain, 3),
            "gain_80": [round(worth.low, 3), round(worth.high, 3)],
            "pays_up_to_batch": worth.pays_up_to,
            "chosen": worth.chosen,
            "verdict": draft_verdict(worth),
            "without": None
            if without is None
            else {
                "plan": describe(without),
                "tpot_ms": round(without.tpot * 1e3, 3),
                "tok_s_per_device": round(without.tok_s_per_device, 2),
                "usd_per_mtok": round(without.usd_per_mtok, 5),
                "verdict": worth.verdict,
            },
        }
    }
