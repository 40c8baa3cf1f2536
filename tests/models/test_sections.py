"""Places of rows in prompts with pictures, and how they turn: those of transformers' Qwen3.5-MoE."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modelling

from afserve.models.rope import tables
from afserve.models.vision.sections import SectionedRotary, TokenSpan, places
from afserve.spec_parts import RopeSpec
from afserve.tiles import PictureTile, WholeEncoderSpec

SPEC = WholeEncoderSpec(9, 4, 16, 1, 1, 4, 2, 100.0, places=2, frames=2, sections=(3, 4, 2))
GRIDS = [(2, 5), (1, 1), (4, 3), (1, 7)]
WORDS = [0, 3, 1, 6, 4]  # before, between and behind them


@pytest.fixture(scope="module")
def said():
    """The pictures, and (3, 1, T) places of all tokens by transformers."""
    kinds, tiles = [], []
    for count, (tall, wide) in zip(WORDS, GRIDS, strict=False):
        kinds += [0] * count
        tiles.append(PictureTile(len(kinds), 8 * wide, bytes(3 * 64 * tall * wide)))
        kinds += [1] * (tall * wide)
    kinds += [0] * WORDS[-1]
    of = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *a, **k: modelling.Qwen3_5MoeModel.get_vision_position_ids(
            of, *a, **k
        ),
    )
    grid = torch.tensor([(1, 2 * tall, 2 * wide) for tall, wide in GRIDS])
    kind = torch.tensor([kinds])
    wanted, _ = modelling.Qwen3_5MoeModel.get_rope_index(of, torch.zeros_like(kind), kind, grid)
    return tiles, wanted


def test_places_are_those_of_transformers_in_pieces_of_any_size(said):
    tiles, wanted = said
    length = wanted.shape[2]
    for size in (1, 2, 7, length):
        spans = [TokenSpan(tiles, start, min(size, length - start)) for start in range(0, length, size)]
        assert torch.equal(torch.cat([places(span, SPEC) for span in spans], 1), wanted[:, 0])


def test_rows_turn_as_in_transformers(said):
    tiles, wanted = said
    turned = {"rope_theta": 50.0, "rope_type": "default", "mrope_section": list(SPEC.sections)}
    config = transformers.Qwen3_5MoeTextConfig(
        head_dim=18, rope_parameters={**turned, "partial_rotary_factor": 1.0}
    )
    cos, sin = modelling.Qwen3_5MoeTextRotaryEmbedding(config)(torch.zeros(1), wanted)
    own = tables(RopeSpec("default", 50.0, 18, False), 64, torch.float32, torch.device("cpu"))
    sectioned = SectionedRotary(SPEC, own.cos_PD, own.sin_PD)
    length = wanted.shape[2]
    turns = sectioned.rotary_rows([TokenSpan(tiles, 0, length - 2), TokenSpan((), 3, 1)])
    assert turns.row_T.tolist() == list(range(length - 1))
    torch.testing.assert_close(turns.cos_TD[:-1], cos[0, :-2, :9])
    torch.testing.assert_close(turns.sin_TD[:-1], sin[0, :-2, :9])
    assert torch.equal(turns.cos_TD[-1], own.cos_PD[3]), "text alone turns by its position"
