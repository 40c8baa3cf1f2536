"""A node on several devices, pretended ones: heads and their keys and values are split over them, and an all-reduce
joins what they add between attention and router. The tokens are those of one device, and of transformers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from afserve.config import ModelSource
from afserve.engine import build as build_node
from afserve.engine.build import colocated, spec_of
from afserve.engine.kv.groups import GroupKind, KvGroup
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import ConfigError
from afserve.families.device_shares import ffn_is_split, is_split
from afserve.kernels.ops import open_ops
from afserve.models.devices.several import Devices
from afserve.models.halves import HeadShare
from tests.engine.driving import BRIEF, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.pretended_devices import colocated_on
from tests.families.tiny import ALL, LARGE4, build

# Heads over key/value heads: 4/2, 4/1 within a window, 4 over a latent, 4 over a latent without a rank of the query,
# with biases and sinks, with gates beside the heads.
SPLIT = [("qwen3", 2), ("qwen3", 4), ("mixtral-window", 2), ("v3", 2), ("v3", 4), ("v3-yarn-noq", 2),
         ("v3-tied-half", 4), ("gptoss", 2), ("gptoss", 4), ("qwen3-tied", 4), ("glm4", 2), ("llama4", 4),
         ("qwen3-next", 2), ("late", 2), ("deepseek32", 2), ("glm5", 4), ("chosen-whole", 2)]  # fmt: skip
# Of a model where a layer that is whole on the first device chooses rows, which one that is split attends too.
CHOSEN_WHOLE = {**LARGE4, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "kv_source_layers": [0, 1, 0, 3],
                "indexer_types": ["full", "shared", "full", "shared"], "index_topk": 5}  # fmt: skip

SHORT = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class CountedJoint:
    """The usual one, which notes the rows it was called with."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.devices: set[int] = set()

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        assert {(part.shape, part.dtype) for part in parts} == {(parts[0].shape, torch.float32)}
        self.rows.append(len(parts[0]))
        self.devices.add(len(parts))
        return open_ops("cpu").add_parts(parts)


@pytest.fixture
def source_of(tmp_path, tiny_checkpoint, monkeypatch):
    monkeypatch.setitem(ALL, "chosen-whole", ("MistralLarge4", CHOSEN_WHOLE))
    kind, fields = ALL["glm5"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    monkeypatch.setitem(ALL, "eight-heads", (kind, fields | heads))

    def source(name, dtype="float32"):
        folder = build(name, tmp_path) if name in ALL and name != "qwen3-next" else tiny_checkpoint(name)
        return ModelSource(str(folder), name, dtype=dtype)

    return source


def split(devices, **fields):
    return config(tensor_parallel=devices, **fields)


def fields_of(name):
    return {"block_size": 16} if name == "llama4" else {}


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), SPLIT)
def test_the_tokens_are_those_of_one_device(name, devices, source_of):
    source, asked, joint = source_of(name), requests(prompts(), BRIEF), CountedJoint()
    node = colocated_on(source, split(devices, **fields_of(name)), joint=joint)
    tokens = collect(drive(node, asked))
    assert tokens == collect(drive(colocated(source, config(**fields_of(name))), asked))
    assert joint.devices == {devices}
    spec = spec_of(source)
    layers = [spec.layer(at) for at in range(spec.layers)]
    halves = sum(is_split(layer.attention) for layer in layers)
    inner = [layer.moe.shared_inner if layer.moe else layer.ffn.inner for layer in layers]
    ffns = sum(ffn_is_split(size, devices) for size in inner)
    assert halves and len(joint.rows) == node.stats().steps * (halves + ffns), (
        "once in each half and FFN of a step"
    )


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("qwen3", 2), ("qwen3", 4), ("mixtral-window", 2), ("v3", 2), ("v2-groups", 4)]
)
@pytest.mark.parametrize("experts", [1, 2])
def test_with_experts_elsewhere(name, devices, experts, source_of, expected):
    source = source_of(name)
    cluster = LocalCluster.build(
        source, split(devices, micro_batches=2, max_batch_tokens=12), experts=experts
    )
    assert collect(cluster.run(requests(prompts()))) == expected(name)
    again = list(cluster.run(requests(prompts())))
    assert collect(again) == expected(name)
    assert sum(event.cached_tokens for event in again) == 16 + 32, "whole blocks of 8, one token left over"
    cluster.attention[0].check()


@pytest.mark.slow
def test_micro_batches_that_take_turns_keep_what_was_chosen(source_of):
    """Each device has copies of all batches that are under way: a layer attends what one before chose in its batch."""
    source, asked = source_of("eight-heads"), requests(prompts((30, 40, 50, 60)), SHORT)
    settings = config(micro_batches=3, block_size=16)

    def answers(devices):
        cluster = LocalCluster.build(source, replace(settings, tensor_parallel=devices), experts=1)
        return collect(cluster.run(asked))

    assert answers(8) == answers(1)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("name", "devices"), [("qwen3", 4), ("v3", 2)])
def test_preemption(name, devices, caching, source_of, expected):
    tight = split(devices, kv_blocks=15, micro_batches=2, prefix_caching=caching, max_batch_tokens=9)
    node = colocated(source_of(name), tight)
    assert collect(drive(node, requests(prompts()))) == expected(name)
    assert node.stats().preemptions > 0


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_batch(name, dtype, source_of):
    """To the bit: log-probabilities of a request alone are those among others."""
    pytest.importorskip("afserve.kernels._native", reason="single rows of PyTorch's products have other bits")
    source = source_of(name, dtype)
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True)

    def answers(texts):
        node = colocated(source, split(2))
        events = drive(node, [GenerationRequest(i, text, params) for i, text in enumerate(texts)])
        return [[e.logprobs for e in events if e.handle == i] for i in range(len(texts))]

    texts = prompts((5, 17, 33, 9))
    assert answers(texts) == [answers([text])[0] for text in texts]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_logits_of_a_split_head_have_the_bits_of_one_device(devices, dtype, backend):
    """Of a vocabulary that the devices do not divide, with a bias. PyTorch's products may sum in another order."""
    if backend == "native":
        pytest.importorskip("afserve.kernels._native")
    ops = open_ops(backend=backend)
    head_VH, rows_RH = (
        torch.randn(n, 96, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1003, 7)
    )
    bias_V = rows_RH.new_ones(1003).cumsum(0).div(97)
    head = Devices(ops, [ops] * (devices - 1)).loading(split_head=True).head
    assert head is not None
    logits_RV = head(head_VH, bias_V)(rows_RH)
    whole_RV = ops.logits(rows_RH, ops.pack_linear(head_VH, bias_V))
    off = 0.0 if backend == "native" else 1e-2
    torch.testing.assert_close(logits_RV, whole_RV, rtol=off, atol=off)


@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_a_tensor_is_read_once_for_all_devices(name, source_of, monkeypatch):
    source, opened, opening = source_of(name), [], build_node.tensors_of

    def tensors_of(*asked, **more):
        opened.append(opening(*asked, **more))
        return opened[-1]

    def read(devices):
        opened.clear()
        node = colocated(source, split(devices))
        assert node.stats().devices == devices
        return sum(one.bytes_read for one in opened)

    monkeypatch.setattr(build_node, "tensors_of", tensors_of)
    assert read(1) == read(2) == read(4) > 0


def test_parts_are_added_in_the_order_of_devices():
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn((7, 33), generator=generator) * 10.0**at for at in range(4)]
    kept = [part.clone() for part in parts]
    wanted, ops = ((parts[0] + parts[1]) + parts[2]) + parts[3], open_ops("cpu")
    assert torch.equal(ops.add_parts(parts), wanted)
    assert not torch.equal(ops.add_parts(parts[::-1]), wanted), "or any order would do"
    assert all(map(torch.equal, parts, kept))
    assert torch.equal(ops.add_parts([part[2:3] for part in parts]), wanted[2:3])
    with pytest.raises(ValueError, match="parts"):
        ops.add_parts([parts[0], parts[1][:2]])


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(
    ("name", "computing", "reading"),
    [("qwen3", 2, 1), ("qwen3", 1, 2), ("qwen3-tied", 4, 2), ("qwen3", 4, 1), ("v3", 2, 1), ("v3", 1, 4)],
)
def test_blocks_move_between_nodes_of_several_devices(name, computing, reading, block_size, source_of):
    """A block's bytes are those of one device, however many devices keep a part of it."""
    source, settings = source_of(name), config(block_size=block_size)
    first, second = (colocated(source, replace(settings, tensor_parallel=n)) for n in (computing, reading))
    (prompt,) = prompts((2 * block_size + 3,))
    (request,) = requests([prompt])
    names = second.usable_names(request)
    wanted = collect(drive(first, [request]))
    found, there = first.blocks.find(names), second.blocks.reserve(2, copies=False)
    assert len(found) == len(names) == 2 and first.kv.fingerprint == second.kv.fingerprint
    payload = bytearray(first.block_bytes * 2)
    assert second.blocks.fill(there, names, payload) != first.blocks.take(found, names, memoryview(payload))
    assert second.blocks.fill(there, names, payload) == first.blocks.take(found, names, memoryview(payload))
    for block, block_name in zip(there, names, strict=True):
        second.blocks.publish(block, block_name)
    second.blocks.release(there)
    events = drive(second, [request])
    assert collect(events) == wanted and events[0].cached_tokens == 2 * block_size
    first.kv.clear(found[:1])
    left = first.kv.read(found).bytes_NY
    assert not left[0].any() and left[1].any()


@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_what_several_devices_keep_alike_is_once_in_a_blocks_bytes(name, source_of):
    """Two heads, each of them on two devices of four; a latent, on all."""
    source = source_of(name)
    one, two, four = (colocated(source, split(count)) for count in (1, 2, 4))
    assert one.block_bytes == two.block_bytes == four.block_bytes
    assert one.kv.fingerprint == two.kv.fingerprint == four.kv.fingerprint
    assert one.kv.memory([0]) is not None and four.kv.memory([0]) is None and four.kv.part_bytes == 0


@pytest.mark.slow
def test_groups_of_kv_on_several_devices(source_of):
    """Two groups, in blocks of other sizes, both split."""
    source, settings = source_of("mixtral-window"), config(max_batch_tokens=32, prefill_tokens=32)
    window = KvGroup(GroupKind.WINDOW, (1, 2), 64, 4, window=20)
    groups = KvGroup(GroupKind.FULL, (0,), settings.kv_blocks, 8), window
    node = colocated(source, replace(settings, tensor_parallel=2), groups)
    for _ in range(2):
        assert collect(drive(node, requests(prompts()))) == collect(
            drive(colocated(source, settings), requests(prompts()))
        )
    assert node.stats().prefix_hits == 48


def test_a_share_is_cut_where_heads_end():
    rows = torch.arange(8)  # four heads of two
    assert [HeadShare(i, 2).cut_rows(rows, 4).tolist() for i in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [HeadShare(i, 4).cut_rows(rows, 2).tolist() for i in range(4)] == [[0, 1, 2, 3]] * 2 + [
        [4, 5, 6, 7]
    ] * 2
    assert HeadShare(1, 2).cut_columns(rows[None], 4).tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("qwen3", 3, "layer 0 has 4 heads .* over 2 of keys and values .* no 3 equal shares; use 2 or 4"),
        ("olmoe", 2, "layer 0 normalises the queries of all heads together"),
    ],
)
def test_what_is_not_split_is_refused(name, devices, said, source_of):
    with pytest.raises(ConfigError, match=said):
        colocated(source_of(name), split(devices))


@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_log_probabilities_of_a_given_text_are_those_of_one_device(name, source_of):
    source = source_of(name)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def told(devices):
        node = colocated(source, split(devices))
        events = drive(node, requests(prompts((40,)), params))
        return torch.tensor(
            [one.logprob for e in events for one in e.prompt_logprobs or () if one is not None]
        )

    wanted = told(1)
    assert len(wanted) == 39 and torch.allclose(told(2), wanted, rtol=0, atol=1e-5)
