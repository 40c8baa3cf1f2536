"""Attention nodes on several devices: what fits is what a device keeps, GPUs are dealt in rows, and the rest is refused
before anything starts."""

from dataclasses import replace

import pytest

from afserve.config import EngineSettings, ModelSource
from afserve.control.changing import Changing
from afserve.control.wire.change_values import ScaleTo
from afserve.engine.build import colocated
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.device_shares import shares_of
from afserve.families.fp8_maps import parameters_in_blocks
from afserve.families.table import load_spec
from afserve.kernels.cache import PagedCache
from afserve.launch.plan.footprint import saved_by_blocks
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import find_model
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.launch.run.room import HostRoom
from afserve.member import Role, attention_node, expert_node
from tests.control.test_changing import ScriptedController
from tests.control.test_scaling import served
from tests.engine.driving import config

CARD = 141 << 30
CPU = EngineSettings(tensor_parallel=2)


def cards(count):
    return Gpus(("H200",) * count, (CARD,) * count, (CARD,) * count)


def chosen(spec, devices, gpus=16, kv_dtype="auto", **asked):
    engine = EngineSettings(device="cuda", tensor_parallel=devices, kv_dtype=kv_dtype)
    wishes = Wishes(**{"attention": 1, "experts": 8} | asked, engine=engine, gpus=cards(gpus))
    return choose(spec, ModelSource("/a/folder", "a model"), Machine(64, 1 << 40, 1 << 40, ""), wishes)


def known(name, folder):
    return replace(load_spec(find_model(name, folder).folder), fp8_block=(128, 128))


@pytest.mark.parametrize(
    ("name", "devices", "kv", "codes"),
    [
        ("qwen3-235b-a22b", 2, 1 / 2, 0.516),
        ("qwen3-235b-a22b", 4, 1 / 4, 0.516),
        ("qwen3-235b-a22b", 8, 1 / 4, 0.516),  # four heads of keys and values, each on two devices
        ("deepseek-v3", 4, 1, 0.507),  # a latent is whole on each
    ],
)
def test_a_gpu_has_its_part_of_kv_and_weights(name, devices, kv, codes, tmp_path):
    spec = known(name, tmp_path)
    one, several = chosen(spec, 1, kv_tokens=1 << 16), chosen(spec, devices, kv_tokens=1 << 16)
    assert several.attention.kv == pytest.approx(one.attention.kv * kv)
    eight = chosen(spec, devices, kv_dtype="int8", kv_tokens=1 << 16)
    assert eight.attention.kv == pytest.approx(several.attention.kv * codes, rel=1e-3)
    shares = shares_of(spec, devices)
    ends = 2 * spec.vocab_size * spec.hidden
    whole = [2 * one.attention_parameters() for one in (spec, shares.leading)]
    saved = [saved_by_blocks(parameters_in_blocks(one), 2) for one in (spec, shares.leading)]
    assert one.attention.weights == whole[0] - saved[0] < 0.6 * whole[0]
    assert several.attention.weights == 2 * shares.leading_parameters - saved[1]
    assert saved[0] / devices <= saved[1] < saved[0] / devices * 2.2, "a latent's map is whole on each"
    assert shares.leading_parameters == whole[1] // 2 - ends // 2 + ends // 2 // devices, (
        "of the LM head its part"
    )
    assert whole[0] / devices < 2 * shares.leading_parameters < ends + (whole[0] - ends) / devices * 2.2
    assert shares.further_parameters < whole[1] / 2 - ends + ends / 2 / devices
    kept = shares_of(spec, devices, split_head=False)
    assert (kept.leading_parameters, kept.head) == (whole[1] // 2, 0)
    assert kept.further_parameters == shares.further_parameters - shares.head
    assert chosen(spec, devices).kv_tokens_of_node >= chosen(spec, 1).kv_tokens_of_node


@pytest.mark.parametrize("name", ["qwen3", "v3", "qwen3-next", "dsa"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_is_counted_is_what_a_node_takes(name, devices, tiny_checkpoint):
    """On a CPU, where all devices of a node are one memory. Blocks of states are filled up by a few bytes."""
    folder = tiny_checkpoint(name)
    spec = load_spec(folder)
    if name == "qwen3-next" and devices == 4:
        pytest.skip("its heads are no 4 equal shares")
    source = ModelSource(str(folder), "tiny", dtype="float32")
    wishes = Wishes(
        1, colocated=True, kv_tokens=640, max_model_len=100, engine=EngineSettings(tensor_parallel=devices)
    )
    found = choose(spec, source, Machine(2, 8 << 30, 8 << 30), wishes)
    engine = found.deployment.engine
    settings = config(kv_blocks=engine.kv_blocks, block_size=engine.block_size, tensor_parallel=devices)
    cache = colocated(source, settings).kv._memory
    assert isinstance(cache, PagedCache)
    taken = sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in layer)
    assert found.attention.kv == pytest.approx(taken, rel=0.02)


def test_gpus_are_dealt_in_rows(tmp_path):
    run = chosen(known("qwen3-235b-a22b", tmp_path), 2, 10, attention=2, experts=4)
    assignment = HostAssignment.all_here(run.deployment, cards(10))
    assert [one.device for one in assignment.hosted] == [f"cuda:{n}" for n in (0, 2, 4, 5, 6, 7)]
    assert assignment.unused == ("cuda:8", "cuda:9")
    more = assignment.having(attention_node(2))
    assert more.devices[attention_node(2)] == "cuda:8" and more.unused == ()
    one = assignment.having(expert_node(4))
    assert one.devices[expert_node(4)] == "cuda:8" and one.unused == ("cuda:9",)
    assert one.having(attention_node(2)).devices[attention_node(2)] in ("cuda:0", "cuda:2"), (
        "two in a row are not left"
    )


def test_as_many_nodes_as_there_are_gpus_for(tmp_path):
    spec = known("qwen3-235b-a22b", tmp_path)
    found = chosen(spec, 2, 8, attention=None, experts=None)
    assert found.picked["attention"] == "2, of 8 GPUs" and found.picked["experts"] == "4, of 8 GPUs"
    assert found.picked["devices"] == "2 GPUs for each attention node"
    said = r"--tensor-parallel 4: 2 attention nodes of 4 GPUs and 2 expert nodes take 10, and 8 are here"
    with pytest.raises(DoesNotFitError, match=said):
        chosen(spec, 4, 8, attention=2, experts=2)


@pytest.mark.parametrize(
    ("gpus", "asked", "said"),
    [
        (4, {}, "1 attention node of 4 GPUs and 1 expert node take 5, and 4 are here; use a smaller N"),
        (
            8,
            {"attention": 2},
            "2 attention nodes of 4 GPUs and 1 expert node take 9, and 8 are here; ask for fewer",
        ),
    ],
)
def test_what_to_do_where_gpus_are_too_few(gpus, asked, said, tmp_path):
    with pytest.raises(DoesNotFitError, match=said):
        chosen(known("qwen3-235b-a22b", tmp_path), 4, gpus, **{"attention": None, "experts": None} | asked)


def test_colocated_experts_are_refused_on_gpus(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--colocated: .* first GPU of a node; give --experts N"
    ) as refused:
        chosen(known("qwen3-235b-a22b", tmp_path), 2, 8, experts=None, colocated=True)
    assert refused.value.exit_code == 2


def room_of(run, assignment, taken, experts=4):
    taken = [*taken, *map(expert_node, range(experts))]
    return HostRoom(run, elsewhere=False, free_rows=lambda experts: assignment.free_rows(taken, experts))


def test_a_run_that_serves_gives_no_gpu_twice(tmp_path):
    run = chosen(known("qwen3-235b-a22b", tmp_path), 2, 11, attention=2, experts=4)
    assignment = HostAssignment.all_here(run.deployment, cards(11))
    taken = [attention_node(0), attention_node(1)]
    room = room_of(run, assignment, taken)
    room.check_more({Role.ATTENTION: 1})  # two of the three GPUs that are left
    room.check_more({Role.ATTENTION: -1})
    room.check_more({Role.EXPERT: 9})
    with pytest.raises(DoesNotFitError, match=r"2 more attention nodes .* 2 free GPUs .* 1 such row is left"):
        room.check_more({Role.ATTENTION: 2})
    for roles in ((Role.ATTENTION, Role.EXPERT), (Role.EXPERT, Role.ATTENTION)):
        with pytest.raises(ConfigError, match=r"role: an attention node has 2 GPUs .* an expert node one"):
            room.check_change(*roles)
    more = assignment.having(attention_node(2))
    with pytest.raises(DoesNotFitError, match=r"1 more attention node .* 0 such rows are left"):
        room_of(run, more, [*taken, attention_node(2)]).check_more({Role.ATTENTION: 1})
    room_of(run, more, taken).check_more({Role.ATTENTION: 1})  # the place of one that went
    assert more.having(attention_node(2)) == more


@pytest.mark.parametrize("first", [attention_node(2), expert_node(3)])
def test_nodes_of_both_roles_that_are_asked_for_at_once_have_gpus_of_their_own(first, tmp_path):
    """Whichever begins first: three GPUs are enough for them, two are not."""
    asked = ScaleTo({"attention": "+1", "experts": "+1"})
    run = chosen(known("qwen3-235b-a22b", tmp_path), 2, 10, attention=2, experts=3)

    def changing(gpus):
        assignment = HostAssignment.all_here(run.deployment, cards(gpus))
        room = room_of(run, assignment, [attention_node(0), attention_node(1)], experts=3)
        membership, _ = served(attention=2, experts=3, most_attention=3)
        return assignment, Changing(ScriptedController(membership), room.check_more)

    with pytest.raises(DoesNotFitError, match=r"0 such rows are left beside 1 more expert node; ask"):
        changing(9)[1].change(asked)
    assignment, fits = changing(10)
    assert set(fits.change(asked).coming) == {"attention-2", "expert-3"}
    both = assignment.having(first).having(attention_node(2)).having(expert_node(3))
    own = both.devices[attention_node(2)], both.devices[expert_node(3)]
    assert own in {("cuda:7", "cuda:9"), ("cuda:8", "cuda:7")} and both.unused == ()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dense_dtype": "int8"}, "and --dense-dtype: maps that are split"),
        ({"tensor_parallel": 3}, r"no 3 equal shares; use "),
        ({"device": "cuda:1"}, "--device cuda:1 is one GPU; use --device cuda"),
    ],
)
def test_what_does_not_go_together_is_refused(asked, said, tmp_path):
    engine = replace(CPU, **asked)
    gpus = None if engine.device == "cpu" else cards(8)
    with pytest.raises(ConfigError, match=said) as refused:
        wishes = Wishes(1, 2, engine=engine, gpus=gpus)
        choose(
            known("qwen3-235b-a22b", tmp_path), ModelSource("/a", "q"), Machine(2, 1 << 42, 1 << 42), wishes
        )
    assert refused.value.exit_code == 2
