"""Drafts that nodes make themselves: the same tokens in fewer steps, and what `--draft` may say."""

from dataclasses import replace
from typing import Any

import pytest

from afserve.config import EngineSettings, ModelSource
from afserve.drafts import DraftChoice, DraftMethod
from afserve.engine.build import colocated
from afserve.engine.draft.adaptive_price import AdaptivePrice
from afserve.engine.draft.ngram import NgramDrafter
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.errors import ConfigError
from afserve.grammars.grammar import of_schema
from afserve.tracing.trace import Trace
from tests.engine.driving import collect, config, drive, requests
from tests.engine.local_cluster import LocalCluster

COPYING = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram:4", "suffix:4"])
@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_what_repeats_is_answered_in_fewer_steps_with_the_same_tokens(name, draft, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    plain = colocated(source, config())
    prompts = [tuple([5, 9, 17, 33, 40, 21] * 6), tuple([7, 8, 9, 10] * 9)]
    wanted = collect(drive(plain, requests(prompts, COPYING)))
    repeated = [(*prompt, *tokens) for prompt, tokens in zip(prompts, wanted, strict=True)]
    again = requests([(*text, *text[:12]) for text in repeated], COPYING)
    wanted = collect(drive(plain, again))
    before = plain.stats().steps
    wanted = collect(drive(plain, again))
    node = colocated(source, config(draft=draft))
    assert collect(drive(node, again)) == wanted
    drafts, steps = node.stats().drafts, node.stats().steps
    assert 0 < drafts.accepted <= drafts.tokens <= 4 * drafts.verified
    assert steps < plain.stats().steps - before + len(again)
    assert node._drafting is not None and not node._drafting._asked, (
        "nothing is kept of those that have ended"
    )


def two_copies() -> Any:
    return requests([tuple([5, 9, 17, 33, 40, 21] * 6), tuple([7, 8, 9, 10] * 9)], COPYING)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "auto"])
def test_what_is_worth_its_rows_is_measured_and_the_tokens_are_the_same(method, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    wanted = collect(drive(colocated(source, config()), two_copies()))
    node = colocated(source, config(draft=method))
    for _ in range(3):
        assert collect(drive(node, two_copies())) == wanted
    assert node._drafting is not None
    price = node._drafting._price
    assert isinstance(price, AdaptivePrice) and price.costs.known
    assert not price.acceptance._trends and not price._resting, "nothing is kept of those that have ended"


@pytest.mark.slow
def test_nodes_that_share_the_experts_know_of_each_others_rows(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    asked = [*two_copies(), *(replace(request, handle=2 + request.handle) for request in two_copies())]
    wanted = collect(drive(colocated(source, config()), asked))
    cluster = LocalCluster.build(source, config(draft="ngram"), attention=2, experts=2)
    found: dict[int, list[int]] = {}
    most = [0.0, 0.0]
    for event in cluster.run(asked):
        found.setdefault(event.handle, []).extend(event.token_ids)
        for index, node in enumerate(cluster.attention):
            price = node._drafting and node._drafting._price
            assert isinstance(price, AdaptivePrice)
            most[index] = max(most[index], price.costs.pool)
    cluster.close()
    assert [found[handle] for handle in sorted(found)] == wanted
    assert all(0.0 < rows < 64.0 for rows in most), "each had the other's in its calls"


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["lengths", "confirmed", "step_measured"])
def test_a_price_that_fails_is_logged_once_and_rests(broken, tiny_checkpoint, monkeypatch, caplog):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    wanted = collect(drive(colocated(source, config()), two_copies()))
    node = colocated(source, config(draft="ngram"))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("scripted")

    monkeypatch.setattr(AdaptivePrice, broken, fail)
    assert collect(drive(node, two_copies())) == wanted
    assert [record.name for record in caplog.records].count("afserve.adviser") == 1
    if broken == "lengths":
        assert node.stats().drafts.tokens == 0


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ((1, 2, 3), []),
        ((1, 2, 7, 8, 9, 1, 2), [7, 8, 9]),
        ((1, 2, 7, 1, 2, 8, 5, 5, 1, 2), [8, 5, 5]),  # the newest
        ((4, 1, 2, 7, 3, 1, 2, 8, 5, 5, 4, 1, 2), [7, 3, 1]),  # the longest
        ((6, 6, 6, 6), [6]),
    ],
)
def test_the_newest_place_of_the_longest_run_is_continued(tokens, wanted):
    request = GenerationRequest(0, tokens, SamplingParams(max_tokens=9))
    guessed = NgramDrafter().guess(Sequence.start(request, 0, frozenset()), 3)
    assert list(guessed.tokens) == wanted and len(guessed.confidence) == len(wanted)


def test_what_was_answered_before_is_answered_in_fewer_steps(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    asked = requests([(5, 9, 17, 33), (7, 8, 9)], COPYING)
    node = colocated(source, config(draft="suffix:16"))
    wanted = collect(drive(node, asked))
    first = node.stats().steps
    assert collect(drive(node, asked)) == wanted
    assert node.stats().steps - first < 16 < first


@pytest.mark.slow
def test_what_a_grammar_forces_is_drafted():
    """Of the bundled model: names of a schema are tokens that it need not think about."""
    source = ModelSource("configs/nano", "nano")
    fields = {name: {"type": "boolean"} for name in ("is_reversible_reaction", "has_intermediate_products")}
    shape = of_schema(
        {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    )
    asked = requests([(5, 9, 17, 33)], SamplingParams(max_tokens=60, temperature=0.0, grammar=shape))
    plain, node = (colocated(source, config(draft=draft)) for draft in ("off", "ngram:16"))
    wanted = collect(drive(plain, asked))
    assert collect(drive(node, asked)) == wanted
    assert node.stats().drafts.accepted > 4 and node.stats().steps < plain.stats().steps - 4


def test_a_trace_has_what_a_step_verified(tiny_checkpoint):
    node = colocated(ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), config(draft="ngram:4"))
    node.trace = trace = Trace("attention-0")
    collect(drive(node, two_copies()))
    found: list[Any] = [args for _, name, *_, args in trace.slices if name == "sample" and args]
    drafts = node.stats().drafts
    assert 0 < len(found) <= drafts.verified
    assert [sum(args[name] for args in found) for name in ("drafted", "accepted")] == [
        drafts.tokens,
        drafts.accepted,
    ]


def test_what_draft_may_say():
    assert DraftChoice.parse("ngram:3") == DraftChoice(DraftMethod.NGRAM, 3)
    assert DraftChoice.parse("off").most == 0
    for text, told in [
        ("eagle9", "not one of"),
        ("ngram:0", "1 to 16"),
        ("ngram:17", "1 to 16"),
        ("ngram:", "1 to 16"),
        ("ngram:-1", "1 to 16"),
        ("ngram:²", "1 to 16"),
        ("ngram:" + "9" * 5000, "1 to 16"),
        ("off:2", "off takes no number"),
    ]:
        with pytest.raises(ConfigError, match=told):
            DraftChoice.parse(text)
    with pytest.raises(ConfigError, match="--draft"):
        EngineSettings(draft="nobody")
