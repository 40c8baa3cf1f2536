"""Row limits of the phases: steps keep to them, also after a change, and mailboxes keep no memory beyond them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.member import AttentionPhase
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

LONG, SHORT = 96, 5
PREFILL, DECODE, BOTH = AttentionPhase.PREFILL, AttentionPhase.DECODE, AttentionPhase.BOTH


@given(
    sequences=st.integers(1, 300),
    batch=st.integers(1, 600),
    prefill=st.integers(1, 4096),
    beside=st.integers(1, 600),
    micro_batches=st.integers(1, 4),
    adaptive=st.booleans(),
)
def test_limits_of_the_phases(sequences, batch, prefill, beside, micro_batches, adaptive):
    made = config(
        max_sequences=sequences,
        max_batch_tokens=batch,
        prefill_tokens=prefill,
        decode_prompt_tokens=beside,
        micro_batches=micro_batches,
        adaptive=adaptive,
    )
    assert made.step_rows(PREFILL) == prefill and made.step_rows(BOTH) == batch
    assert 1 <= made.step_rows(DECODE) <= min(batch, sequences + beside)
    assert made.step_rows(DECODE) == replace(made, prefill_tokens=1).step_rows(DECODE)
    assert made.most_rows == max(prefill, batch)


def test_a_decode_step_holds_all_that_may_run_in_one_micro_batch():
    fixed = config(max_sequences=100, max_batch_tokens=512, micro_batches=3, decode_prompt_tokens=10)
    assert fixed.step_rows(DECODE) == 34 + 1 + 10
    assert replace(fixed, adaptive=True).step_rows(DECODE) == 110


@pytest.fixture
def cluster(tiny_checkpoint, monkeypatch):
    seen: dict[int, int] = {}
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    made = config(
        max_batch_tokens=32, prefill_tokens=LONG, decode_prompt_tokens=SHORT, max_sequences=4, kv_blocks=96
    )
    built = LocalCluster.build(source, made, attention=2, experts=2)
    for index, node in enumerate(built.attention):
        plain = node._link.dispatch

        def dispatch(x_TH, *rest, plain=plain, index=index, **named):
            seen[index] = max(seen.get(index, 0), len(x_TH))
            return plain(x_TH, *rest, **named)

        monkeypatch.setattr(node._link, "dispatch", dispatch)
    yield source, made, built, seen
    built.close()


def set_phases(built, *phases):
    for node, phase in zip(built.attention, phases, strict=True):
        node.in_phase(phase)
    for expert in built.experts:
        expert.in_phases(dict(enumerate(phases)))


@pytest.mark.slow
def test_steps_keep_to_the_limit_of_their_phase_and_tokens_stay(cluster):
    source, made, built, seen = cluster
    asked = requests(
        prompts((130, 130, 110, 110)), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    )
    alone = collect(drive(colocated(source, made), asked))
    set_phases(built, PREFILL, DECODE)
    assert collect(built.run(asked)) == alone
    assert seen[0] == LONG and 2 < seen[1] <= made.step_rows(DECODE) == SHORT + 4
    seen.clear()
    set_phases(built, DECODE, PREFILL)
    again = [GenerationRequest(r.handle, r.prompt_ids[::-1], r.params) for r in asked]
    expected = collect(drive(colocated(source, made), again))
    assert collect(built.run(again)) == expected
    assert seen[0] <= made.step_rows(DECODE) and seen[1] == LONG


@pytest.mark.slow
def test_a_change_in_the_middle_of_a_prompt(cluster):
    source, made, built, seen = cluster
    asked = requests(prompts((180, 150)), SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    alone = collect(drive(colocated(source, made), asked))
    set_phases(built, PREFILL, PREFILL)
    for request in asked:
        built.submit(request)
    events = [event for _ in range(3) for event in built.step()]
    assert seen == {0: LONG, 1: LONG}
    set_phases(built, DECODE, DECODE)
    while any(node.busy for node in built.attention):
        events += built.step()
    assert collect(events) == alone


def test_mailboxes_of_decode_nodes_keep_no_memory_for_prompts(cluster):
    _, made, built, _ = cluster
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    set_phases(built, PREFILL, PREFILL)
    collect(built.run(requests(prompts((130, 130)), greedy)))

    def kept(attention):
        lanes = [lane for expert in built.experts for lane in expert._port._transport._lanes._by_index]
        return max(lane.rows for lane in lanes if lane.box.attention == attention)

    assert kept(0) > made.step_rows(DECODE) < kept(1)
    set_phases(built, DECODE, PREFILL)
    again = [
        GenerationRequest(r.handle + 2, r.prompt_ids[::-1], r.params)
        for r in requests(prompts((40, 40)), greedy)
    ]
    for _ in built.run(again):
        pass
    assert kept(0) <= made.step_rows(DECODE) and kept(1) > made.step_rows(DECODE)
