"""How long blocks are, and that memory is counted with the states in them."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.config import EngineSettings, ModelSource
from afserve.engine.build import colocated
from afserve.families.table import load_spec, spec_from_config
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.placement.kv_blocks import KvRoom, block_size, kv_room

MODELS = Path(__file__).parents[2] / "configs/models"
GIB = 1 << 30


def known(name):
    return spec_from_config(tomllib.loads((MODELS / f"{name}.toml").read_text())["config"])


def per_token(spec, element, asked=None, kv_tokens=None):
    return spec.kv_bytes_per_token(element, block_size(spec, element, asked, kv_tokens))


def test_states_take_no_more_than_keys_and_values():
    spec = known("qwen3-next-80b-a3b")
    assert spec.state_bytes() == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    size = block_size(spec, 2, None)
    assert size % 16 == 0 and (size - 16) * spec.kv_bytes_per_token(2) < spec.state_bytes()
    assert per_token(spec, 2) <= 2 * spec.kv_bytes_per_token(2) < per_token(spec, 2, 64)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_others_have_blocks_of_16(name):
    spec = known(name)
    assert block_size(spec, 2, None) == 16 and block_size(spec, 2, 48) == 48
    assert per_token(spec, 2) == spec.kv_bytes_per_token(2)


@pytest.mark.parametrize(("tokens", "size"), [(100, 16), (4096, 512), (1 << 20, 3216)])
def test_a_small_cache_has_several_blocks(tokens, size):
    assert block_size(known("qwen3-next-80b-a3b"), 2, None, tokens) == size
    assert block_size(known("qwen3-next-80b-a3b"), 2, 1024, tokens) == 1024


def test_a_model_of_states_alone():
    spec = known("qwen3-next-80b-a3b")
    assert block_size(replace(spec, pattern=spec.pattern[:3]), 2, None) == 4096


@pytest.mark.parametrize("asked", [None, 8, 64])
def test_what_is_counted_is_what_is_opened(asked, tiny_checkpoint):
    """A state's row of a block is filled up to an even number of elements; nothing else is not counted."""
    folder = tiny_checkpoint("qwen3-next")
    spec, source = load_spec(folder), ModelSource(str(folder), "tiny")
    wishes = Wishes(kv_tokens=640, engine=EngineSettings(block_size=asked), max_model_len=100)
    found = choose(spec, source, Machine(2, 8 * GIB, 8 * GIB), wishes)
    engine = found.deployment.engine
    assert (
        engine.block_size == block_size(spec, 4, asked, 640) and engine.kv_blocks == 640 // engine.block_size
    )
    assert ("block-size" in found.picked) == (asked is None)
    states = sum(spec.layer(layer).attention.kind == "linear" for layer in range(spec.layers))
    counted, filling = per_token(spec, 4, asked, 640) * engine.block_size, states * 2 * 4 * engine.block_size
    assert counted <= colocated(source, engine).kv.block_bytes + engine.block_size
    assert colocated(source, engine).kv.block_bytes <= counted + filling


def test_layers_with_windows_keep_what_is_seen():
    """gpt-oss-20b: half of its layers see 128 tokens."""
    spec = known("gpt-oss-20b")
    assert len(spec.windowed_layers) == spec.layers // 2 and spec.widest_window == 128
    room, whole = kv_room(spec, 2, 16, 256, 640), spec.kv_bytes_per_token(2)
    assert room.seen == 256 * 9 + 40 + 2 and room.whole == room.windowed == 8 * whole
    assert room.window_blocks(1 << 14) == room.seen + (1 << 11)
    few = 16 * 3000  # less than half would be saved
    assert not room.window_blocks(3000) and room.bytes_of(few) == few * whole
    assert room.tokens_in(4 * GIB) > 1.3 * 4 * GIB / whole


def test_models_of_one_kind_of_layer_keep_all():
    for name in ("qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"):
        room = kv_room(known(name), 2, 16, 256, 640)
        assert not room.windowed and not room.window_blocks(1 << 20)


@given(st.builds(KvRoom, *[st.integers(1, 1 << n) for n in (10, 20, 20, 16)]), st.integers(0, 1 << 44))
def test_what_is_said_to_fit_fits(room, size):
    tokens = room.tokens_in(size)
    assert room.bytes_of(max(0, tokens)) <= size and tokens % room.block == 0
    blocks = tokens // room.block
    assert room.window_blocks(blocks) <= blocks
    assert blocks >= size // (room.whole + room.windowed), "never fewer than if all layers kept all tokens"
