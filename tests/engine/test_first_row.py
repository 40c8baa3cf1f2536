"""A prompt's last row, computed by one node, gives another the first token without a step, and the same answer."""

from dataclasses import replace

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, Purpose, SamplingParams
from afserve.errors import RequestError
from afserve.models.decoder import AttentionModel
from afserve.models.experts import ExpertBank
from tests.engine.driving import collect, config, drive, prompts, requests

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=0.9, seed=3, ignore_eos=True, logprobs=2)


@pytest.fixture
def node(tiny_checkpoint):
    def make(**fields):
        return colocated(ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), config(**fields))

    return make


def rows_of(node, wanted):
    """By handle, the row behind each request's last token."""
    asked = [replace(request, params=ONE, purpose=Purpose.PROMPT) for request in wanted]
    return {event.handle: event.row for event in drive(node, asked)}


def test_a_row_comes_only_to_whoever_wants_it(node):
    one = node()
    assert all(event.row == b"" for event in drive(one, requests(prompts(), ONE)))
    rows = rows_of(one, requests(prompts()))
    assert {len(row) for row in rows.values()} == {one.row_bytes} and len(set(rows.values())) == 3


def test_tokens_and_log_probabilities_are_those_of_a_node_that_computed_the_prompt(node):
    wanted = requests(prompts((5, 24, 33)), DRAWN)
    rows = rows_of(node(), wanted)
    alone = drive(node(), wanted)
    brought = drive(node(), [replace(request, row=rows[request.handle]) for request in wanted])
    assert collect(brought) == collect(alone)
    for handle in range(3):
        said = [[event.logprobs for event in events if event.handle == handle] for events in (brought, alone)]
        assert said[0] == said[1]


def test_the_first_token_costs_no_step(node):
    """The last one does: what is behind the cached blocks is computed with it."""
    one = node()
    (request,) = requests(prompts((33,)), ONE)
    row = rows_of(one, [request])[0]
    before = one.stats().dispatches
    (event,) = drive(one, [replace(request, row=row)])
    assert event.finish_reason == "length" and event.cached_tokens == 32
    assert one.stats().dispatches == before
    (again,) = drive(one, [request])
    assert again.token_ids == event.token_ids and one.stats().dispatches > before


def test_a_request_with_a_row_may_end_or_be_cancelled_before_it_is_drawn(node):
    one = node(max_sequences=1)
    (request,) = requests(prompts((33,)), DRAWN)
    row = rows_of(one, [request])[0]
    one.submit(request)
    one.submit(GenerationRequest(9, request.prompt_ids, DRAWN, row=row))
    one.step()
    one.cancel(9)
    while one.busy:
        assert all(event.handle == 0 for event in one.step())
        one.check()


@pytest.mark.slow
def test_a_preempted_sequence_draws_from_its_row_once(node):
    small = node(kv_blocks=9)
    wanted = requests(prompts((30, 30)), replace(DRAWN, max_tokens=20))
    alone = collect(drive(node(), wanted))
    rows = rows_of(node(), wanted)
    assert collect(drive(small, [replace(one, row=rows[one.handle]) for one in wanted])) == alone
    assert small.stats().preemptions > 0


@pytest.fixture
def counted(node, monkeypatch):
    """A node; rows of each call of its experts, by layer, and of each of its LM head."""

    def make(**fields):
        one, layers, head = node(**fields), [], []
        forward, logits = ExpertBank.forward, AttentionModel.logits

        def counted_forward(bank, layer, x_RH, *rest, **more):
            layers.append((layer, len(x_RH)))
            return forward(bank, layer, x_RH, *rest, **more)

        def counted_logits(model, x_RH):
            head.append(len(x_RH))
            return logits(model, x_RH)

        monkeypatch.setattr(ExpertBank, "forward", counted_forward)
        monkeypatch.setattr(AttentionModel, "logits", counted_logits)
        return one, layers, head

    return make


def test_the_last_layer_goes_on_with_rows_that_somebody_reads(counted):
    one, layers, head = counted(max_batch_tokens=32)
    (request,) = requests(prompts((80,)), ONE)
    drive(one, [request])
    last = max(layer for layer, _ in layers)
    assert [rows for layer, rows in layers if layer == 0] == [32, 32, 16]
    assert [rows for layer, rows in layers if layer == last] == [1] and head == [1]


def test_nobody_computes_logits_of_a_row_that_somebody_else_draws_from(counted):
    one, _, head = counted(max_batch_tokens=64)
    wanted = requests(prompts((33, 20)), ONE)
    events = drive(one, [replace(wanted[0], purpose=Purpose.PROMPT), wanted[1]])
    assert head == [1] and {event.handle: bool(event.row) for event in events} == {0: True, 1: False}
    assert all(event.finish_reason == "length" for event in events)


def test_a_row_comes_with_one_token():
    with pytest.raises(RequestError, match="purpose"):
        GenerationRequest(0, (1, 2), DRAWN, purpose=Purpose.PROMPT)
