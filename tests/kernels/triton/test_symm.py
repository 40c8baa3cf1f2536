"""The protocol of M2N between GPUs, by nodes that take turns, and in the interpreter by processes that do not."""

import json

import pytest
import torch

from afserve.comm.device_exchange.ends import Patience
from afserve.comm.device_exchange.region import Region
from afserve.comm.m2n.fused_message import fill
from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.m2n.rows import DeviceSplit
from afserve.comm.transport import Header, Kind, Layout, Parcel, WireType
from afserve.errors import PeerLost
from afserve.kernels.reference import Reference
from tests.comm.begun import FORKED, import_also
from tests.kernels.triton.symm_nodes import CUDA, DEVICE, Domain, compute, serve
from tests.warm.interpreter import WARM

SHORT = Patience(50_000_000) if CUDA else Patience(50, timed=False)
STAMP = torch.tensor([1, 7], dtype=torch.int32, device=DEVICE)


def make_layout(out=WireType.BFLOAT16, back=WireType.FLOAT32, hidden=200, top_k=3, most=5, micro_batches=1):
    return Layout(hidden, top_k, most, micro_batches, 2, 4, out, back)


def scripted(rows, layout, nodes, seed):
    """Small whole numbers, exact in every wire type but FP8's; some choices are none, some rows have none at all."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randint(-4, 5, (rows, layout.hidden), generator=generator).float()
    slot_TK = torch.randint(-1, nodes * layout.slots, (rows, layout.top_k), generator=generator).int()
    weight_TK = torch.randint(1, 4, (rows, layout.top_k), generator=generator).float()
    if rows > 2:
        slot_TK[1] = -1
    return x_TH.to(DEVICE), slot_TK.to(DEVICE), weight_TK.to(DEVICE)


def staged(rows, layout, wire):
    """A mailbox that has something else in it."""
    header = Header(Kind.DISPATCH, 0, 0, 0, rows, wire)
    x_RH = torch.full((rows, layout.hidden), 3.0, device=DEVICE).to(wire.dtype)
    slot_RK = torch.full((rows, layout.top_k), -7, dtype=torch.int32, device=DEVICE)
    scale_RS = torch.zeros((rows, -(-layout.hidden // 128)), device=DEVICE)
    return Parcel(header, x_RH, slot_RK, slot_RK.float(), scale_RS if wire is WireType.FLOAT8 else None)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("wire", list(WireType), ids=lambda wire: wire.name)
def test_a_message_through_a_mailbox_is_one_launch(wire, replicas, request):
    """And says what a dozen of PyTorch's say, to each node, of experts that are none or have no home, too."""
    if wire is WireType.FLOAT8:
        request.getfixturevalue("fp8")
    layout, generator, nodes = make_layout(wire), torch.Generator().manual_seed(3), 3
    slot_EP = torch.randint(0, nodes * layout.slots, (6, replicas), generator=generator).int()
    slot_EP[[2, -1]] = -1
    below_EP = torch.rand((6, max(replicas - 1, 1)), generator=generator).sort(1).values
    routes = LayerRoutes(slot_EP, below_EP, nodes, layout.slots).to(DEVICE)
    x_TH = torch.randn((5, layout.hidden + 3), generator=generator).bfloat16()[:, :-3].to(DEVICE)
    expert_TK = torch.randint(-1, 5, (5, layout.top_k), generator=generator).to(DEVICE)
    weight_TK = torch.rand((5, layout.top_k), generator=generator).to(DEVICE)
    for node in range(nodes):
        wanted, got = staged(5, layout, wire), staged(5, layout, wire)
        DeviceSplit(routes, x_TH, expert_TK, weight_TK).fill(node, wanted)
        DeviceSplit(routes, x_TH, expert_TK, weight_TK, fill).fill(node, got)
        for mine, theirs in zip(got[1:], wanted[1:], strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine.float(), theirs.float())


def by_hand(x_TH, slot_TK, weight_TK):
    return x_TH * ((slot_TK >= 0) * weight_TK * (slot_TK + 1)).sum(1, keepdim=True)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("out", list(WireType), ids=lambda wire: wire.name)
@pytest.mark.parametrize(("attention", "experts"), [(1, 1), (2, 3), (3, 1)], ids=["1x1", "2x3", "3x1"])
def test_any_ratio_and_wire_type(attention, experts, out, request):
    if out is WireType.FLOAT8:
        request.getfixturevalue("fp8")
    layout = make_layout(out)
    domain = Domain(attention, experts, layout)
    fronts, backs = (
        [domain.attention(a) for a in range(attention)],
        [domain.expert(f) for f in range(experts)],
    )
    for turn in range(3):
        sent = [
            scripted((turn * 2 + a) % (layout.max_rows + 1), layout, experts, 10 * turn + a)
            for a in range(attention)
        ]
        if out is WireType.FLOAT8:
            sent = [(x.sign() * 7 / 4, slot, weight) for x, slot, weight in sent]
        tickets = [
            front.dispatch(x.to(torch.bfloat16), slot, weight, STAMP, 0)
            for front, (x, slot, weight) in zip(fronts, sent)
        ]
        for f, back in enumerate(backs):
            arrival = back.receive(0)
            assert arrival.header_N2.tolist() == [STAMP.tolist()] * attention
            back.answer(arrival, compute(arrival, f, layout.slots))
        for front, ticket, one in zip(fronts, tickets, sent):
            y_TH = front.combine(ticket)
            torch.testing.assert_close(y_TH, by_hand(*one), rtol=1e-6, atol=0)
            front.check()


def test_rows_go_once_to_each_node_that_has_one_of_their_slots():
    layout = make_layout()
    domain = Domain(1, 3, layout)
    front = domain.attention(0)
    slot_TK = torch.tensor(
        [[0, 1, 9], [5, -1, -1], [-1, -1, -1], [8, 4, 0]], dtype=torch.int32, device=DEVICE
    )
    ticket = front.dispatch(
        torch.ones(4, layout.hidden, device=DEVICE), slot_TK, torch.ones(4, 3, device=DEVICE), STAMP, 0
    )
    assert ticket.place_NT.tolist() == [[0, -1, -1, 1], [-1, 0, -1, 1], [0, -1, -1, 1]]
    arrival = domain.expert(0).receive(0)
    assert arrival.slot_NK[:2].tolist() == [[0, 1, -1], [-1, -1, 0]]
    assert (arrival.slot_NK[2:] == -1).all()


@pytest.mark.parametrize(("replicas", "dtype"), [(1, torch.float32), (2, torch.float32), (3, torch.bfloat16)])
def test_experts_become_the_slots_that_routes_choose(replicas, dtype):
    """Down to the bytes of all messages."""
    torch.manual_seed(replicas)
    layout, experts, rows = make_layout(most=140, hidden=32), 7, 140
    slot_EP = torch.randint(0, 3 * layout.slots, (experts + 1, replicas)).int()
    slot_EP[-1] = -1
    below_EP = torch.rand(experts + 1, max(replicas - 1, 1)).sort(1).values
    routes = LayerRoutes(slot_EP, below_EP, 3, layout.slots).to(DEVICE)
    x_TH, weight_TK = torch.randn(rows, 32).to(DEVICE, dtype), torch.rand(rows, 3).to(DEVICE)
    expert_TK = torch.randint(-1, experts, (rows, 3)).to(DEVICE)
    found = []
    for sent in ((expert_TK, routes), (routes.choose(x_TH, expert_TK), None)):
        domain = Domain(1, 3, layout)
        ticket = domain.attention(0).dispatch(x_TH, sent[0], weight_TK, STAMP, 0, sent[1])
        found.append((ticket.place_NT, domain.memory))
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize("shared", [False, True])
def test_sums_are_added_as_single_ops_add_them(shared):
    layout, generator = make_layout(hidden=1100), torch.Generator().manual_seed(0)
    domain = Domain(1, 2, layout)
    front, sent = domain.attention(0), scripted(4, layout, 2, 5)
    ticket = front.dispatch(*sent, STAMP, 0)
    for f in range(2):
        back = domain.expert(f)
        arrival = back.receive(0)
        back.answer(arrival, compute(arrival, f, layout.slots))
    x_TH, shared_TH = (torch.randn(4, 1100, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    x_TH[0, 1050], x_TH[2, 3] = float("nan"), float("inf")
    bad_T = torch.tensor([-1, -1, 1, -1], dtype=torch.int32, device=DEVICE)
    wanted_TH, wanted_T = x_TH + shared_TH if shared else x_TH.clone(), bad_T.clone()
    Reference(DEVICE).add_sums(wanted_TH, front.combine(ticket), wanted_T, 2)
    front.fold_sums(ticket, x_TH, shared_TH if shared else None, bad_T, 2)
    torch.testing.assert_close(x_TH, wanted_TH, rtol=0, atol=0, equal_nan=True)
    assert bad_T.tolist() == wanted_T.tolist() == [2, -1, 1, -1]


def test_partial_sums_travel_in_bf16_and_are_added_in_float32_in_the_order_of_the_nodes():
    layout = make_layout(WireType.FLOAT32, WireType.BFLOAT16, hidden=128, top_k=2)
    domain = Domain(1, 2, layout)
    front, backs = domain.attention(0), [domain.expert(f) for f in range(2)]
    slot_TK = torch.tensor([[0, 4]], dtype=torch.int32, device=DEVICE)
    ticket = front.dispatch(
        torch.ones(1, 128, device=DEVICE), slot_TK, torch.ones(1, 2, device=DEVICE), STAMP, 0
    )
    parts = (1 / 3, 1e-4)
    for back, part in zip(backs, parts):
        back.answer(back.receive(0), torch.full((layout.max_rows, 128), part, device=DEVICE))
    first, second = (torch.tensor(part, device=DEVICE).bfloat16().float() for part in parts)
    assert (front.combine(ticket) == first + second).all()


def test_a_silent_expert_node_is_named_and_its_rows_are_no_numbers():
    layout = make_layout()
    domain = Domain(1, 2, layout, SHORT)
    front, back = domain.attention(0), domain.expert(0)
    x_TH, slot_TK, weight_TK = scripted(4, layout, 2, 3)
    ticket = front.dispatch(x_TH, slot_TK, weight_TK, STAMP, 0)
    back.answer(back.receive(0), torch.zeros(layout.max_rows, layout.hidden, device=DEVICE))
    assert front.combine(ticket).isnan().all()
    with pytest.raises(PeerLost, match="expert-1: it sent nothing within"):
        front.check()


def test_a_silent_attention_node_is_named_and_the_others_rows_are_there():
    layout = make_layout()
    domain = Domain(2, 1, layout, SHORT)
    x_TH, slot_TK, weight_TK = scripted(3, layout, 1, 3)
    domain.attention(0).dispatch(x_TH, slot_TK.clamp_min(0), weight_TK, STAMP, 0)
    back = domain.expert(0)
    arrival = back.receive(0)
    assert (arrival.slot_NK[:3] >= 0).all() and (arrival.slot_NK[3:] == -1).all()
    with pytest.raises(PeerLost, match="attention-1"):
        back.check()


def test_hostile_counts_and_slots_stay_inside():
    layout = make_layout()
    domain = Domain(1, 1, layout)
    domain.attention(0).dispatch(*scripted(2, layout, 1, 1), STAMP, 0)
    region = Region.of(Kind.DISPATCH, layout)
    half_B = domain.memory[0, 0, 0, 0][
        256 + region.half : 256 + 2 * region.half
    ]  # number 1 lies in the odd half
    half_B[:4].view(torch.int32).fill_(1 << 30)
    half_B[region.slot : region.slot + 4 * layout.max_rows * layout.top_k].view(torch.int32).fill_(1 << 20)
    arrival = domain.expert(0).receive(0)
    assert arrival.x_NH.shape[0] == layout.max_rows and (arrival.slot_NK == -1).all()


def test_numbers_of_both_directions_wrap():
    """At 2^31 messages, weeks of serving, and at 2^32."""
    for last in (2**31 - 2, -2):
        layout = make_layout()
        domain = Domain(1, 1, layout)
        front, back = domain.attention(0), domain.expert(0)
        for end in (front, back):
            end._number_MN[0].fill_(last)
        for turn in range(4):
            sent = scripted(2, layout, 1, turn)
            ticket = front.dispatch(*sent, STAMP, 0)
            arrival = back.receive(0)
            back.answer(arrival, compute(arrival, 0, layout.slots))
            assert torch.equal(front.combine(ticket), by_hand(*sent))
        front.check()
        assert front._number_MN[0].item() == (last + 4 + 2**31) % 2**32 - 2**31


def test_flags_order_memory_as_they_say_and_are_compiled_once():
    """A peer's memory is written by plain stores, released at system scope: PCIe has no atomics between GPUs."""
    done = WARM.said("tests.kernels.triton.symm_ptx", "90", seconds=280.0)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for name in ("raise_flag", "signal_boxes"):
        assert found[name] == {"variants": 1, "orders": ["st.release.sys.global.b32"]}
    awaits = found["await_flag"]["orders"]
    assert any("acquire" in one and "sys" in one for one in awaits) and "ld.volatile.global.b32" in awaits
    assert found["await_flag"]["variants"] == 1
    assert any("acquire" in one and "sys" in one for one in found["wait_boxes"]["orders"])
    assert not [one for kernel in found.values() for one in kernel["orders"] if "exch" in one]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_graph_of_both_ends_on_one_gpu_replays_with_other_rows():
    layout = make_layout(hidden=512)
    domain = Domain(1, 2, layout)
    front, backs = domain.attention(0), [domain.expert(f) for f in range(2)]
    sent = scripted(layout.max_rows, layout, 2, 0)

    def turn():
        ticket = front.dispatch(*sent, STAMP, 0)
        for f, back in enumerate(backs):
            arrival = back.receive(0)
            back.answer(arrival, compute(arrival, f, layout.slots))
        return front.combine(ticket)

    turn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = turn()
    for seed in range(1, 5):
        for mine, given in zip(sent, scripted(layout.max_rows, layout, 2, seed)):
            mine.copy_(given)
        graph.replay()
        assert torch.equal(y_TH, by_hand(*sent))
    front.check()


@pytest.mark.process
@pytest.mark.skipif(CUDA, reason="with a GPU, test_symm_transport does this")
def test_processes_that_write_into_each_others_memory(tmp_path):
    """Two micro-batches under way at once; nobody but the flags says when a message is there."""
    layout, turns = make_layout(hidden=64, micro_batches=2), 3
    shared = 1, 2, layout, Patience(5_000_000, timed=False), tmp_path / "memory"
    front = Domain(*shared).attention(0)
    import_also("tests.kernels.triton.symm_nodes")
    begun = FORKED.Barrier(3)
    backs = [FORKED.Process(target=serve, args=(shared, f, turns, begun), daemon=True) for f in range(2)]
    for back in backs:
        back.start()
    begun.wait(120)  # or this one would interpret a loop that waits for flags, for as long as they start
    for turn in range(turns):
        sent = [scripted(layout.max_rows - m, layout, 2, 2 * turn + m) for m in range(2)]
        tickets = [front.dispatch(*one, STAMP, m) for m, one in enumerate(sent)]
        for ticket, one in zip(tickets, sent):
            assert torch.equal(front.combine(ticket), by_hand(*one))
    front.check()
    for back in backs:
        back.join(60)
        assert back.exitcode == 0
