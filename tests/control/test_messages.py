"""The control plane's values survive the wire, and bytes of strangers do not get in."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from afserve import errors
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.config import EngineConfig, ModelSource
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire import messages
from afserve.control.wire.desired import Deployment
from afserve.control.wire.fields import put_settings, take_settings
from afserve.control.wire.load_values import ClassCounts, GatewayLoad, LoadCounts
from afserve.control.wire.placement_values import Adopt, FillSlots, Retire, Routed
from afserve.control.wire.placements import pack
from afserve.control.wire.request_values import (
    Acknowledge,
    Attend,
    Cancel,
    Held,
    Refused,
    Resume,
    Submit,
    Tokens,
)
from afserve.control.wire.values import (
    Assigned,
    AttentionNodes,
    AttentionPeer,
    Drain,
    Drained,
    Endpoint,
    ExpertPeer,
    Failed,
    Gateways,
    Heartbeat,
    Identity,
    NodeStage,
    Peers,
    Progress,
    Query,
    QueryAnswer,
    Ready,
    Record,
    Recorded,
    Register,
    Shutdown,
    Standing,
    Stuck,
    Traced,
    Unheard,
)
from afserve.engine.scheduling.found_below import FoundBelow
from afserve.engine.scheduling.request import (
    NO_TENANT,
    GenerationRequest,
    Origin,
    SamplingParams,
    Tenant,
    TokenEvent,
    TokenLogprob,
)
from afserve.engine.scheduling.routed_experts import RoutedExperts
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.member import AttentionPhase, Role, attention_life, expert_life
from afserve.placement.placement import Placement
from afserve.placement.rebalance.stats import RoutedRows
from afserve.tiles import PictureTile

PLACEMENT = Placement.contiguous(layers=2, experts=4, nodes=3, slots_per_node=2).with_epoch(3)
RUN = Deployment(
    ModelSource("/m", "m", "bfloat16", "dummy", 3, 7),
    EngineConfig(64, 9, adaptive=True),
    {Role.ATTENTION: 2, Role.EXPERT: 3},
    "f",
    PLACEMENT,
)
FROM_NODE = [
    Register("attention", 0, 3, "host", "1"),
    Register("expert", None, 3, "host", "1", protocol=9),
    Register("gateway", 1, 3, "host", "1", standing=Standing(512, NodeStage.LOADED)),
    Register(
        "expert",
        1,
        3,
        "host",
        "1",
        standing=Standing(
            2,
            NodeStage.DRAINING,
            7,
            Endpoint("", {}),
            Identity({}),
            (PLACEMENT,),
            (PLACEMENT.with_epoch(9),),
            11,
        ),
    ),
    Endpoint("shm:1:2", {"hidden": "4"}),
    Endpoint("", {}),
    Identity({"expert weights": "00ff (9 tensors of BF16)", "tokenizer.json": "absent"}),
    Identity({}),
    Progress(0.5, "weights"),
    Ready(0),
    Ready(1, 0.07),
    Ready(1, None, 0.01),
    Ready(1, isa="avx2"),
    Heartbeat(5, AttentionStats(1, 2)),
    Heartbeat(5, ExpertStats(1, 2, busy_seconds=0.5)),
    Drained(),
    Query(3, "view", b"\x00\xff"),
    Stuck(expert_life(2, 1), 1.25),
    Stuck(expert_life(2, 1), 1.25, unreachable=True),
    Unheard(attention_life(1, 3), 2.5),
    GatewayLoad(LoadCounts(came=3, prompt_tokens=900, found_tokens=64, rest_tokens=40, first_seconds=0.25)),
    GatewayLoad(LoadCounts(came=3), {"chat": ClassCounts(2, 2, 1), "bulk": ClassCounts(1, goodput_tokens=9)}),
    Recorded(4, b"\x00\xff"),
    Traced(b"\x00\xff"),
]
FROM_ATTENTION = [
    Attend(attention_life(3, 7)),
    Attend(attention_life(3, 7), (Held(1 << 41, 5), Held(2, 0)), 9),
    Tokens(()),
]
TO_ATTENTION = [Cancel(0), Acknowledge((1, 1 << 41)), Acknowledge(()), Resume(1 << 41, 0), Resume(1, 77)]
TO_ATTENTION.append(
    Submit(GenerationRequest(1, (2, 2, 3), tiles=(PictureTile(0, 1, bytes(9)), PictureTile(1, 2, b""))))
)
TO_NODE = [
    Assigned(expert_life(1, 4), RUN),
    Assigned(
        expert_life(1, 4), replace(RUN, log_level="info", log_format="json", otlp_endpoint="http://c:4318")
    ),
    Assigned(expert_life(1, 4), RUN.in_phase(1, AttentionPhase.DECODE)),
    Peers((ExpertPeer(expert_life(0, 0), "a"), ExpertPeer(expert_life(2, 4), "b"))),
    Peers(),
    Gateways(((0, ""), (3, "host:1"))),
    AttentionNodes(
        (AttentionPeer(attention_life(0, 3), True), AttentionPeer(attention_life(2, 0), False)),
        "layer 3 has no expert 7",
    ),
    AttentionNodes((AttentionPeer(attention_life(1, 0), True, "unix:1", AttentionPhase.PREFILL),)),
    AttentionNodes(),
    QueryAnswer(3, b"abc"),
    Drain(),
    Shutdown(),
    FillSlots(PLACEMENT),
    FillSlots(PLACEMENT, urgent=True),
    Adopt(PLACEMENT),
    Retire(2),
    Record(4, 0.25),
]


DECODERS = (
    messages.decode_from_node,
    messages.decode_to_node,
    messages.decode_from_attention,
    messages.decode_to_attention,
)


@pytest.mark.parametrize("value", FROM_NODE, ids=lambda value: type(value).__name__)
def test_what_nodes_say(value):
    assert messages.decode_from_node(messages.encode_from_node(value)) == value


@pytest.mark.parametrize("value", TO_NODE, ids=lambda value: type(value).__name__)
def test_what_the_controller_says(value):
    assert messages.decode_to_node(messages.encode_to_node(value)) == value


@pytest.mark.parametrize("value", FROM_ATTENTION, ids=lambda value: type(value).__name__)
def test_what_attention_nodes_say_to_gateways(value):
    assert messages.decode_from_attention(messages.encode_from_attention(value)) == value


@pytest.mark.parametrize("value", TO_ATTENTION, ids=lambda value: type(value).__name__)
def test_what_gateways_say(value):
    assert messages.decode_to_attention(messages.encode_to_attention(value)) == value


def test_where_a_request_comes_from():
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    for origin in (Origin(), Origin("my.id:7"), Origin("x", parent)):
        value = Submit(GenerationRequest(1, (2,), origin=origin))
        assert messages.decode_to_attention(messages.encode_to_attention(value)) == value
    for origin in (
        Origin("two\nlines"),
        Origin("x" * 129),
        Origin("x", "00-ab-cd-01"),
        Origin("x", parent + "\n"),
    ):
        said = messages.encode_to_attention(Submit(GenerationRequest(1, (2,), origin=origin)))
        with pytest.raises(errors.ProtocolError):
            messages.decode_to_attention(said)


def test_which_nodes_may_compute_a_prompt_together():
    for within, helpers in (
        (None, ()),
        (0.25, (SplitMember(3, "unix:there"), SplitMember(0, "tcp://10.0.0.1:4"))),
    ):
        source = KvSource(attention_life(1, 2), 0, "unix:here", prefills=True, within=within, helpers=helpers)
        value = Submit(GenerationRequest(1, (2,)), source)
        assert messages.decode_to_attention(messages.encode_to_attention(value)) == value


def test_whose_request_it_is():
    for tenant in (NO_TENANT, Tenant("alice"), Tenant("ü.b", 1000)):
        value = Submit(GenerationRequest(1, (2,), tenant=tenant))
        assert messages.decode_to_attention(messages.encode_to_attention(value)) == value
    said = messages.encode_to_attention(Submit(GenerationRequest(1, (2,), tenant=Tenant("alice", 7))))
    wrong = said.replace(b"alice", b"al\nce")
    assert wrong != said
    with pytest.raises(errors.ProtocolError):
        messages.decode_to_attention(wrong)


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
    st.integers(0, 2**64 - 1),
    st.lists(ids, max_size=5).map(tuple),
    st.sampled_from([None, "stop", "length", "cancelled", "error"]),
    stop_token_id=st.none(),
    logprobs=st.lists(logprob, max_size=2).map(tuple),
    prompt_logprobs=st.lists(st.none() | logprob, max_size=3).map(tuple),
    cached_tokens=st.integers(0, 2**31),
    found_below=st.builds(FoundBelow, *3 * [st.integers(0, 2**31)]),
    pooled=st.binary(max_size=16),
    queued=st.floats(0, 1e6),
    routed=st.none()
    | st.integers(0, 9).map(lambda tokens: RoutedExperts(2, 3, 2, bytes(range(12 * tokens)))),
)


def test_experts_of_long_prompts_have_messages_of_their_own():
    """In order; small ones stay together."""
    sizes = [0, 10, 3 << 19, 3 << 19, 0, 10, 4 << 20, 10]
    events = [
        TokenEvent(n, (n,), routed=RoutedExperts(1, 2, 1, bytes(size)) if size else None)
        for n, size in enumerate(sizes)
    ]
    parts = [[event.handle for event in part.events] for part in Tokens.split(events)]
    assert parts == [[0, 1], [2], [3, 4], [5], [6], [7]]


failure = st.builds(
    TokenEvent, st.just(7), st.just(()), st.just("error"), error=st.text(min_size=1, max_size=50)
)


@pytest.mark.slow
@given(st.lists(event | failure, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_step_of_events(events):
    value = Tokens(tuple(events))
    there = messages.decode_from_attention(messages.encode_from_attention(value))
    assert there == value and [e.queued for e in there.events] == [e.queued for e in events]


counts = st.integers(1, 4).flatmap(
    lambda layers: arrays(
        np.int64,
        (2, layers, 3),
        elements=st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1]),
    )
)


@given(counts)
@settings(max_examples=100, deadline=None)
def test_any_counts(counts_KLE):
    sent = Routed(RoutedRows(counts_KLE[0], counts_KLE[1]))
    got = messages.decode_from_node(messages.encode_from_node(sent))
    assert isinstance(got, Routed)
    assert (got.rows.prefill_LE == counts_KLE[0]).all() and (got.rows.decode_LE == counts_KLE[1]).all()


def test_counts_of_a_second_at_the_shape_of_deepseek_v3_are_small():
    rows = np.random.default_rng(1).integers(0, 200, (58, 256))
    assert len(messages.encode_from_node(Routed(RoutedRows(np.zeros_like(rows), rows)))) < 15_000


@pytest.mark.parametrize(
    ("fields_of", "said"),
    [
        ({"width": 3, "decode": b"abc"}, "counts of 3 bytes"),
        ({"width": 1, "decode": b"abc"}, "3 bytes of counts, 2 x 2 of 1 are 4"),
        ({"width": 8, "decode": b"\xff" * 32}, "above 2"),
        ({"width": 8, "layers": 1 << 31, "experts": 1 << 31}, "0 bytes of counts"),
    ],
)
def test_counts_that_no_node_sends_are_refused(fields_of, said):
    envelope = pb.FromNode(routed=pb.Routed(**{"layers": 2, "experts": 2, **fields_of}))
    with pytest.raises(errors.ProtocolError, match=said):
        messages.decode_from_node(envelope.SerializeToString())


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
    return_routed_experts=st.booleans(),
)


pooled = st.just(SamplingParams(max_tokens=1, pooled=True))


@given(st.integers(0, 2**64 - 1), st.lists(ids, max_size=30), params | pooled, st.lists(ids, max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_request(number, prompt, sampling, generated):
    value = Submit(GenerationRequest(number, tuple(prompt), sampling, tuple(generated)))
    assert messages.decode_to_attention(messages.encode_to_attention(value)) == value


def test_errors_keep_their_kind():
    full = errors.OverloadedError("full", retry_after=3.5)
    refused = messages.decode_from_attention(messages.encode_from_attention(Refused(4, full)))
    assert isinstance(refused, Refused) and isinstance(refused.error, errors.OverloadedError)
    assert (refused.error.retry_after, refused.request) == (3.5, 4)
    wrong = errors.RequestError("too long", param="prompt")
    failed = messages.decode_from_node(messages.encode_from_node(Failed(wrong)))
    assert isinstance(failed, Failed) and isinstance(failed.error, errors.RequestError)
    assert (type(failed.error), failed.error.param) == (errors.RequestError, "prompt")
    lost = messages.decode_from_node(messages.encode_from_node(Failed(errors.PeerLost("expert-1", "gone"))))
    assert isinstance(lost, Failed)
    assert isinstance(lost.error, errors.PeerError) and lost.error.message == "expert-1: gone"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_bytes_of_strangers_are_refused_or_harmless(data):
    for decode in DECODERS:
        try:
            decode(data)
        except errors.ProtocolError as error:
            assert str(len(data)) in error.message


def test_counts_that_do_not_add_up_are_refused():
    wire = pb.FromAttention(tokens=pb.Tokens(request=[1], count=[2], token=[5]))
    with pytest.raises(errors.ProtocolError, match="counts say 2"):
        messages.decode_from_attention(wire.SerializeToString())


@pytest.mark.parametrize(
    ("value", "wire"),
    [(ModelSource, pb.ModelSource), (Register, pb.Register), (Progress, pb.Progress)],
)
def test_a_new_field_is_not_forgotten_on_the_wire(value, wire):
    assert {field.name for field in fields(value)} == {field.name for field in wire.DESCRIPTOR.fields}


ENGINE = EngineConfig(64, 9, adaptive=True, prefix_caching=False, device="cuda:3", max_waiting=1 << 20)


def wired(engine):
    proto = pb.EngineConfig()
    put_settings(engine, proto)
    return proto


def test_every_setting_travels_with_its_type():
    assert take_settings(EngineConfig, wired(ENGINE)) == ENGINE
    assert set(wired(ENGINE).settings) == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "scalar", "said"),
    [("max_wait", {"whole": 3}, "max_wait is not one of adaptive"), ("block_size", None, "block_size: missing"),
     ("block_size", {}, "block_size: None is not a whole number in"),
     ("block_size", {"whole": 0}, "block_size: 0 is outside [1, 4096]"),
     ("block_size", {"text": "16"}, "block_size: '16' is not a whole number"),
     ("prefix_caching", {"whole": 1}, "prefix_caching: 1 is not true or false"),
     ("device", {"flag": True}, "device: True is not a text"),
     ("wire_dtype", {"text": "fp4"}, "wire_dtype: 'fp4' is not one of auto, fp8")],
)  # fmt: skip
def test_other_settings_are_refused_by_name(name, scalar, said):
    proto = pb.ToNode(
        assigned=pb.Assigned(
            role="attention", placement=pb.SaidPlacement(data=pack(PLACEMENT)), engine=wired(ENGINE)
        )
    )
    proto.assigned.source.dtype, proto.assigned.source.load_format = "auto", "dummy"
    proto.assigned.engine.settings.pop(name, None)
    if scalar is not None:
        proto.assigned.engine.settings[name].CopyFrom(pb.Scalar(**scalar))
    with pytest.raises(errors.ProtocolError) as refused:
        messages.decode_to_node(proto.SerializeToString())
    assert said in refused.value.message


def test_a_new_sampling_parameter_is_not_forgotten():
    above = {"stop", "n", "include_stop_str_in_output"}  # dealt with where text is
    sent = {field.name for field in pb.Sampling.DESCRIPTOR.fields} - {"bias_token", "bias_value"}
    assert {field.name for field in fields(SamplingParams)} - above - {"logit_bias"} == sent
