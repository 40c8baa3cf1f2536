"""The control plane's values survive the wire, and bytes of strangers do not get in."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve import errors
from afserve.config import EngineConfig, ModelSource
from afserve.control import control_pb2 as pb
from afserve.control import messages
from afserve.control.values import (
    Assigned,
    Cancel,
    Drain,
    Drained,
    Endpoint,
    Failed,
    Heartbeat,
    Peers,
    Progress,
    Ready,
    Refused,
    Register,
    Run,
    Shutdown,
    Submit,
    Tokens,
)
from afserve.engine.request import GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from afserve.engine.stats import AttentionStats, ExpertStats

RUN = Run(
    ModelSource("/m", "m", "bfloat16", "dummy", 3, 7), EngineConfig(64, 9, adaptive=True), 2, 3, "f", "{}"
)
FROM_NODE = [
    Register("attention", 0, 3, "host", "1"),
    Register("expert", None, 3, "host", "1", protocol=9),
    Endpoint("shm:1:2", {"hidden": "4"}),
    Endpoint("", {}),
    Progress(0.5, "weights"),
    Ready(0),
    Heartbeat(5, AttentionStats(1, 2, expert_rows=((1, 2), (3,)))),
    Heartbeat(5, ExpertStats(1, 2, busy_seconds=0.5, slot_rows=((), (4,)))),
    Tokens(()),
    Drained(),
]
TO_NODE = [Assigned("expert", 1, RUN), Peers(("a", "b")), Peers(), Cancel(0), Drain(), Shutdown()]


@pytest.mark.parametrize("value", FROM_NODE, ids=lambda value: type(value).__name__)
def test_what_nodes_say(value):
    assert messages.decode_from_node(messages.encode_from_node(value)) == value


@pytest.mark.parametrize("value", TO_NODE, ids=lambda value: type(value).__name__)
def test_what_the_controller_says(value):
    assert messages.decode_to_node(messages.encode_to_node(value)) == value


ids = st.integers(0, 2**32 - 1)
logprob = st.builds(
    TokenLogprob,
    ids,
    st.floats(-100, 0),
    ids,
    st.lists(st.tuples(ids, st.floats(-9, 0)), max_size=3).map(tuple),
)
event = st.builds(
    TokenEvent,
    st.integers(0, 2**40).map(str),
    st.lists(ids, max_size=5).map(tuple),
    st.sampled_from([None, "stop", "length", "cancelled", "error"]),
    stop_token_id=st.none(),
    logprobs=st.lists(logprob, max_size=2).map(tuple),
    prompt_logprobs=st.lists(st.none() | logprob, max_size=3).map(tuple),
    cached_tokens=st.integers(0, 2**31),
)


@given(st.lists(event, max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_step_of_events(events):
    value = Tokens(tuple(events))
    assert messages.decode_from_node(messages.encode_from_node(value)) == value


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**24),
    temperature=st.floats(0, 100),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    top_k=st.integers(-1, 2**24),
    min_tokens=st.integers(0, 10),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3).map(tuple),
)


@given(st.integers(0, 2**40), st.lists(ids, max_size=30), params)
@settings(max_examples=60, deadline=None)
def test_any_request(number, prompt, sampling):
    value = Submit(GenerationRequest(str(number), tuple(prompt), sampling))
    assert messages.decode_to_node(messages.encode_to_node(value)) == value


def test_errors_keep_their_kind():
    full = errors.OverloadedError("full", retry_after=3.5)
    refused = messages.decode_from_node(messages.encode_from_node(Refused(4, full)))
    assert (type(refused.error), refused.error.retry_after, refused.request) == (
        errors.OverloadedError,
        3.5,
        4,
    )
    wrong = errors.RequestError("too long", param="prompt")
    failed = messages.decode_from_node(messages.encode_from_node(Failed(wrong)))
    assert (type(failed.error), failed.error.param) == (errors.RequestError, "prompt")
    lost = messages.decode_from_node(messages.encode_from_node(Failed(errors.PeerLost("expert-1", "gone"))))
    assert isinstance(lost.error, errors.PeerError) and lost.error.message == "expert-1: gone"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_bytes_of_strangers_are_refused_or_harmless(data):
    for decode in (messages.decode_from_node, messages.decode_to_node):
        try:
            decode(data)
        except errors.ProtocolError as error:
            assert str(len(data)) in error.message


def test_counts_that_do_not_add_up_are_refused():
    wire = pb.FromNode(tokens=pb.Tokens(request=[1], count=[2], token=[5]))
    with pytest.raises(errors.ProtocolError, match="counts say 2"):
        messages.decode_from_node(wire.SerializeToString())


@pytest.mark.parametrize(
    ("value", "wire"),
    [(ModelSource, pb.ModelSource), (EngineConfig, pb.EngineConfig), (AttentionStats, pb.AttentionStats),
     (ExpertStats, pb.ExpertStats), (Register, pb.Register), (Progress, pb.Progress)],
)  # fmt: skip
def test_a_new_field_is_not_forgotten_on_the_wire(value, wire):
    assert {field.name for field in fields(value)} == {field.name for field in wire.DESCRIPTOR.fields}


def test_a_new_sampling_parameter_is_not_forgotten():
    above = {"stop", "n", "include_stop_str_in_output"}  # dealt with where text is
    sent = {field.name for field in pb.Sampling.DESCRIPTOR.fields} - {"bias_token", "bias_value"}
    assert {field.name for field in fields(SamplingParams)} - above - {"logit_bias"} == sent
