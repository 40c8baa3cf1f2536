"""Prompts that several prefill nodes compute together give the colocated engine's tokens, whatever happens to a part."""

from dataclasses import replace

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.local import LocalCluster, colocated
from afserve.engine.request import SamplingParams
from tests.control.phased import Phased
from tests.engine.driving import FAMILIES, config, drive, prompts, requests

ASKED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LENGTHS = (5, 70, 141, 180)
SMALL = {"max_batch_tokens": 32, "prefill_tokens": 32, "kv_blocks": 64}
RATE = 100.0  # tokens per second that nodes are taken to compute; the 180 take 1.8 s at one node


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(tiny_checkpoint):
    """The colocated engine's tokens, by family."""
    known = {}

    def tokens(name):
        if name not in known:
            node = colocated(ModelSource(str(tiny_checkpoint(name)), name), config(**SMALL))
            said = {}
            for event in drive(node, requests(prompts(LENGTHS), ASKED)):
                said.setdefault(event.handle, []).extend(event.token_ids)
            known[name] = said
        return known[name]

    return tokens


def split(path, name, prefill=2, *, within=0.5, kv_blocks=64, experts=1, **fields):
    """Every prompt of more than some tokens is late at one node, and in time at all of them."""
    sizes = SMALL | {"kv_blocks": kv_blocks}
    cluster = LocalCluster.build(
        ModelSource(str(path), name), config(**sizes, micro_batches=2), attention=prefill + 1, experts=experts
    )
    world = Phased(cluster, prefill, **fields)
    world.within = within
    (decode,) = world.decoding
    for end in world.prefilling:
        end.node._meter.prompt_rate = RATE
        decode.exchange._puller.loads[decode.exchange._peer(end.address)] = world.load(RATE)
    return world


def ask(world, request, lead=0):
    others = tuple(end for end in world.prefilling if end is not world.prefilling[lead])
    world.submit(request, world.prefilling[lead], world.decoding[0], others)


def counts(world):
    stats = [end.moves.stats() for end in world.prefilling]
    return tuple(sum(getattr(one, name) for one in stats) for name in ("split", "split_short", "parts"))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_colocated_engine(name, parts, tiny_checkpoint, alone):
    world = split(tiny_checkpoint(name), name, parts, within=1.8 if parts == 2 else 1.2)
    ask(world, requests(prompts(LENGTHS), ASKED)[3])
    world.run()
    assert world.said[3] == alone(name)[3]
    assert counts(world) == (1, 0, parts - 1)
    assert world.cached[3] == 0
