"""Which transport a run gets and which GPU a node: what suits hosts and devices, refusals by name. Needs no GPU."""

import json
import sys
from dataclasses import asdict

import pytest

from afserve.config import EngineConfig, EngineSettings, ModelSource
from afserve.control.wire.desired import Deployment
from afserve.errors import ConfigError
from afserve.families.table import load_spec
from afserve.launch.plan.gpus import Gpus, check_device, probe_gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.transports import choose_transport
from afserve.launch.plan.wishes import Share, Wishes
from afserve.member import NodeId, Role, expert_node
from afserve.placement.placement import Placement

NO_GPUS = Gpus()


def gpus(count, reach=True, free=80 << 30):
    return Gpus(("H200",) * count, (free,) * count, (free,) * count, reach)


def hosted(*devices, elsewhere=()):
    """Roles in turn; devices of another host after those of this one."""
    here = [
        HostedNode(NodeId(Role.EXPERT if i else Role.ATTENTION, i), "127.0.0.1", True, d)
        for i, d in enumerate(devices)
    ]
    return here + [HostedNode(expert_node(9 + i), "10.0.0.2", False, d) for i, d in enumerate(elsewhere)]


@pytest.mark.parametrize(
    ("where", "there", "kind", "why"),
    [
        (hosted("cpu", "cpu"), NO_GPUS, "shm", "all nodes on this machine"),
        (hosted("cpu", elsewhere=["cpu"]), NO_GPUS, "tcp", "between hosts"),
        (hosted("cuda:0", "cuda:1"), gpus(2), "symm", "reach each other's memory"),
        (hosted("cuda:0", "cuda:1"), gpus(2, reach=False), "dist", "NCCL"),
        (hosted("cuda:0", elsewhere=["cuda:0"]), gpus(1), "dist", "NCCL"),
        (hosted("cuda:0", "cuda:0"), gpus(1), "shm", "2 nodes share cuda:0, rows through pinned host memory"),
        (hosted("cuda:0", elsewhere=["cuda:0", "cuda:0"]), gpus(1), "tcp", "2 nodes share cuda:0"),
        (hosted("cuda:0", "cpu"), gpus(1), "shm", "pinned host memory"),
        (hosted("cpu", elsewhere=["cuda:0"]), NO_GPUS, "tcp", "pinned host memory"),
    ],
)
def test_auto_suits_hosts_and_devices(where, there, kind, why):
    choice = choose_transport("auto", where, there)
    assert choice.kind == kind and why in choice.reason


BOTH_ROLES_THERE = [
    *hosted("cpu", elsewhere=["cpu"]),
    HostedNode(NodeId(Role.ATTENTION, 1), "10.0.0.2", False, "cpu"),
]


def test_nodes_that_share_a_host_share_memory():
    choice = choose_transport("auto", BOTH_ROLES_THERE, NO_GPUS)
    assert (choice.kind, choice.reason) == ("pairs", "tcp between hosts, shared memory inside one")
    assert choose_transport("auto", hosted("cpu", "cpu", elsewhere=["cpu"]), NO_GPUS).kind == "pairs"
    assert choose_transport("auto", BOTH_ROLES_THERE, NO_GPUS, certified=True).reason.endswith(", over TLS")


@pytest.mark.parametrize("asked", ["dist", "shm", "symm"])
def test_with_certificates_rows_go_between_hosts_encrypted_or_not_at_all(asked):
    apart = hosted("cpu", elsewhere=["cpu"])
    assert choose_transport("auto", apart, NO_GPUS, certified=True).reason == "between hosts, over TLS"
    assert choose_transport("tcp", apart, NO_GPUS, certified=True).kind == "tcp"
    with pytest.raises(ConfigError, match="in plain text, although there are --certs"):
        choose_transport(asked, apart, NO_GPUS, certified=True)


def test_a_name_is_taken_where_it_reaches_every_node():
    assert choose_transport("dist", hosted("cpu", elsewhere=["cpu"]), NO_GPUS).kind == "dist"
    assert choose_transport("tcp", hosted("cpu"), NO_GPUS).kind == "tcp"
    assert choose_transport("symm", hosted("cuda:0", "cuda:1"), gpus(2)).kind == "symm"
    assert choose_transport("shm", hosted("cuda:0", "cuda:1"), gpus(2)).kind == "shm"


@pytest.mark.parametrize("name", ["shm", "symm"])
def test_what_reaches_no_other_host_says_so(name):
    with pytest.raises(ConfigError, match=f"--transport {name}: reaches no other host; use tcp or dist"):
        choose_transport(name, hosted("cuda:0", elsewhere=["cuda:0"]), gpus(1))


def test_symm_is_for_gpus():
    with pytest.raises(ConfigError, match="--transport symm: is for nodes on GPUs; give --device cuda"):
        choose_transport("symm", hosted("cpu", "cpu"), NO_GPUS)


def test_nccl_needs_a_gpu_for_each_node_and_symm_does_not():
    with pytest.raises(ConfigError, match="--transport dist: needs a GPU for each node, but 2 nodes are on"):
        choose_transport("dist", hosted("cuda:0", "cuda:0"), gpus(1))
    assert choose_transport("symm", hosted("cuda:0", "cuda:0"), gpus(1)).kind == "symm"


def test_symm_is_for_gpus_that_reach_each_other():
    with pytest.raises(ConfigError, match="--transport symm: these GPUs do not reach each other's memory"):
        choose_transport("symm", hosted("cuda:0", "cuda:1"), gpus(2, reach=False))


def run_of(device, attention, experts):
    engine = EngineConfig(64, 9, device=device)
    counts = {Role.ATTENTION: attention, Role.EXPERT: experts}
    placement = Placement.contiguous(layers=1, experts=8, nodes=experts)
    return Deployment(ModelSource("/m", "m"), engine, counts, "f", placement)


def devices(assignment):
    return [one.device for one in assignment.hosted]


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("npu", "Ascend"), ("npu:3", "Ascend"), ("ascend", "Ascend"), ("rocm", "AMD: MI300's FP8 is e4m3fnuz"),
        ("hip:0", "AMD"), ("xpu", "Intel"), ("mps", "Apple"),
    ],
)  # fmt: skip
def test_other_vendors_are_named_and_refused(device, why):
    with pytest.raises(ConfigError, match=rf"--device {device}: {why}.*; use --device cpu on such a host"):
        check_device(device)


def test_a_pytorch_for_amd_is_refused_although_its_devices_are_called_cuda(monkeypatch):
    import torch

    from afserve.launch.plan import gpus as found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    said = probe_gpus([sys.executable, "-c", f"print({json.dumps(json.dumps(asdict(found._look())))})"])
    with pytest.raises(
        ConfigError, match=r"--device cuda:1: this PyTorch is built for AMD: .*use --device cpu"
    ):
        said.chosen("cuda:1")


def test_each_node_has_a_gpu_of_its_own_while_there_are_enough():
    assert devices(HostAssignment.all_here(run_of("cuda", 1, 2), gpus(3))) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices(HostAssignment.all_here(run_of("cuda", 1, 2), gpus(8))) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices(HostAssignment.all_here(run_of("cuda", 2, 3), gpus(2))) == ["cuda:0", "cuda:1"] * 2 + [
        "cuda:0"
    ]
    assert devices(HostAssignment.all_here(run_of("cuda:1", 1, 1), gpus(2))) == ["cuda:1"] * 2
    assert devices(HostAssignment.all_here(run_of("cpu", 1, 1), NO_GPUS)) == ["cpu"] * 2


@pytest.mark.parametrize(
    ("device", "count", "attention", "experts", "shares"),
    [
        ("cuda", 2, 1, 1, [Share(1, 0), Share(0, 1)]),
        ("cuda", 4, 1, 2, [Share(1, 0), Share(0, 1), Share(0, 1)]),
        ("cuda", 2, 2, 3, [Share(1, 2), Share(1, 1)]),
        ("cuda:0", 1, 1, 2, [Share(1, 2)]),
    ],
)
def test_a_gpus_memory_is_shared_by_the_nodes_on_it(device, count, attention, experts, shares):
    assert (
        list(
            Wishes(gpus=gpus(count), engine=EngineSettings(device=device)).memory_shares(
                Share(attention, experts)
            )
        )
        == shares
    )


def test_the_kv_cache_is_cut_for_the_gpus_memory():
    spec, source = load_spec(CONFIGS / "nano"), ModelSource(str(CONFIGS / "nano"), "nano")
    host = Machine(16, 512 << 30, 512 << 30)
    small = choose(
        spec,
        source,
        host,
        Wishes(gpus=gpus(4, free=1 << 30), max_model_len=512, engine=EngineSettings(device="cuda")),
    )
    large = choose(
        spec, source, host, Wishes(gpus=gpus(4), max_model_len=512, engine=EngineSettings(device="cuda"))
    )
    assert small.deployment.counts == {Role.ATTENTION: 2, Role.EXPERT: 2, Role.GATEWAY: 0}
    assert small.attention.total < 1 << 30
    assert small.kv_tokens_of_node <= large.kv_tokens_of_node
    shared = choose(
        spec, source, host, Wishes(attention=3, experts=3, gpus=gpus(2), engine=EngineSettings(device="cuda"))
    )
    assert shared.picked["devices"] == "6 nodes on 2 GPUs, which they share"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "CPU", "cpu:0", "martian"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match=r"--device: .* is not cpu, cuda"):
        check_device(device)


def test_a_gpu_that_is_not_there_is_refused():
    for device, there in (("cuda", NO_GPUS), ("cuda:0", NO_GPUS), ("cuda:2", gpus(2))):
        with pytest.raises(ConfigError, match=f"--device {device}: torch finds {len(there)} CUDA device"):
            there.chosen(device)
    assert len(gpus(4).chosen("cuda")) == 4
    assert len(gpus(4).chosen("cuda:3")) == 1


@pytest.mark.process
def test_torch_is_asked_in_a_process_of_its_own():
    found = probe_gpus()
    assert len(found.names) == len(found.free) == len(found.total)


def test_what_is_said_of_the_gpus_is_read_back():
    said = json.dumps({"names": ["a"], "free": [5], "total": [6], "reach": True})
    assert probe_gpus([sys.executable, "-c", f"print({said!r})"]) == Gpus(("a",), (5,), (6,), True)
    for program in ("print('no json')", "raise SystemExit(3)"):
        with pytest.raises(ConfigError, match="could not be asked"):
            probe_gpus([sys.executable, "-c", program])
