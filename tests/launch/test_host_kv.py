"""The memory that --kv-host takes beside weights and KV caches, and what is said where it does not fit."""

from dataclasses import replace

import pytest

from afserve.config import EngineSettings, ModelSource
from afserve.errors import DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Share, Wishes

GIB = 1 << 30
NANO = load_spec(CONFIGS / "nano")
SOURCE = ModelSource(str(CONFIGS / "nano"), "nano")
HERE = Machine(2, 8 * GIB, 16 * GIB, "")


def chosen(host: str, machine=HERE, **wishes):
    device = wishes.pop("device", "cpu")
    asked = Wishes(experts=1, engine=EngineSettings(kv_host=host, device=device), **wishes)
    return choose(NANO, SOURCE, machine, asked)


def test_kv_caches_get_what_it_leaves():
    without, beside = chosen(""), chosen("4GiB")
    assert beside.attention.host == 4 * GIB and without.attention.host == 0
    assert beside.attention.total + beside.expert.total <= HERE.memory
    assert (
        beside.deployment.engine.kv_host == "4GiB"
        and 0 < beside.kv_tokens_of_node <= without.kv_tokens_of_node
    )


@pytest.mark.parametrize("attention", [1, 2, 3])
def test_what_is_too_large_says_how_much_fits_and_that_fits(attention):
    with pytest.raises(
        DoesNotFitError, match=r"^--kv-host 100GiB: 100 GiB for .* of a host with 8 GiB free; "
    ) as refused:
        chosen("100GiB", attention=attention)
    most = refused.value.message.rpartition("at most ")[2].removesuffix(" fit")
    assert ("each of" in refused.value.message) == (attention > 1)
    assert chosen(most, attention=attention).attention.host == int(most.removesuffix("MiB")) << 20
    with pytest.raises(DoesNotFitError, match=f"at most {most} fit"):
        chosen(f"{int(most.removesuffix('MiB')) + 1}MiB", attention=attention)


def test_a_cache_of_a_given_size_comes_first():
    with pytest.raises(DoesNotFitError) as refused:
        chosen("7GiB", kv_tokens=65536)
    with pytest.raises(DoesNotFitError) as less:
        chosen("7GiB", kv_tokens=2 * 65536)

    def most(error):
        return int(error.value.message.rpartition("at most ")[2].removesuffix("MiB fit"))

    assert most(refused) > most(less)


def test_nothing_fits_where_the_model_fills_the_host():
    small = replace(HERE, memory=int(0.9 * GIB))
    with pytest.raises(DoesNotFitError, match=r"nothing fits beside|at most"):
        chosen("4GiB", small)


def test_beside_gpus_it_is_the_memory_of_the_host():
    gpus = Gpus(("H200", "H200"), (100 * GIB, 100 * GIB), (140 * GIB, 140 * GIB))
    found = chosen("6GiB", device="cuda", gpus=gpus)
    assert found.attention.host == 0 and found.deployment.engine.kv_host_bytes == 6 * GIB
    assert found.kv_tokens_of_node == chosen("", device="cuda", gpus=gpus).kv_tokens_of_node
    with pytest.raises(DoesNotFitError, match="of a host with 8 GiB free; at most 6860MiB fit"):
        chosen("50GiB", device="cuda", gpus=gpus)


def test_nodes_of_other_hosts_see_for_themselves():
    hosts = (Share(0, 1), Share(1, 0, here=False))
    assert chosen("7GiB", hosts=hosts, attention=1, kv_tokens=4096)


def test_rows_that_lie_in_the_host_leave_the_fast_memory_to_index_keys(tiny_checkpoint):
    """Of a token 28 numbers in each of four layers, and index keys of 12 in three: four bytes each."""
    path, gpus = (
        tiny_checkpoint("dsa"),
        Gpus(("H200", "H200"), (100 * GIB, 100 * GIB), (140 * GIB, 140 * GIB)),
    )

    def found(device, rows, tokens=4096):
        engine = EngineSettings(device=device, kv_near_rows=rows)
        wishes = Wishes(experts=1, kv_tokens=tokens, gpus=gpus if device == "cuda" else None, engine=engine)
        return choose(load_spec(path), ModelSource(str(path), "dsa"), HERE, wishes)

    row, rest = 4 * 4 * 28, 4 * 3 * 12 + 4 * 4
    assert found("cuda", 0).attention.kv == 4096 * (row + rest - 4 * 4)
    assert found("cuda", 16).attention.kv == 16 * row + 4096 * rest
    assert found("cpu", 16).attention.kv == 16 * row + 4096 * (row + rest)
    assert (
        found("cuda", 16).picked["kv-near-rows"].endswith(f"takes {rest} bytes beside, and {row} in the host")
    )
    with pytest.raises(DoesNotFitError, match=r"--kv-tokens 33554432: .* at most [0-9]+ fit") as refused:
        found("cuda", 16, 1 << 25)
    most = int(refused.value.message.rpartition("at most ")[2].removesuffix(" fit"))
    assert 0 < most * row < 8 * GIB and found("cuda", 16, most).kv_tokens_of_node == most
