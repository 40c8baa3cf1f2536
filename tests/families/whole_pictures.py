"""A tiny Qwen3.5-MoE and Qwen3-VL-MoE that see, pictures of several shapes, and what transformers says of them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from afserve.engine.scheduling.request import GenerationRequest
from afserve.tiles import PictureTile
from tests.conftest import SIZES
from tests.engine import greedy
from tests.families.tiny import NEXT_ALL_MOE

TOKEN, STEP = 210, 8
GRIDS = {1: (3, 3), 2: (1, 9), 3: (9, 1), 4: (3, 3), 5: (2, 4)}
MARKS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
TURNED = {
    "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "mrope_section": [2, 3, 1],
    "mrope_interleaved": True,
}  # fmt: skip
TEXT = {**NEXT_ALL_MOE, "full_attention_interval": 2, "rope_parameters": TURNED}
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 25, "out_hidden_size": TEXT["hidden_size"], "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}  # fmt: skip
DEEP_TEXT = {
    **SIZES, "num_hidden_layers": 4, "intermediate_size": 80, "moe_intermediate_size": 20, "num_experts": 6,
    "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16, "mlp_only_layers": [2],
    "rope_parameters": {**TURNED, "partial_rotary_factor": 1.0},
}  # fmt: skip
DEEP_VISION = {
    **VISION,
    "out_hidden_size": SIZES["hidden_size"],
    "depth": 3,
    "deepstack_visual_indexes": [0, 1],
}
READS = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 6 * STEP**2, "longest_edge": 60 * STEP**2},
}  # fmt: skip


def tile(seed: int, start: int) -> PictureTile:
    tall, wide = (STEP * side for side in GRIDS[seed])
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (3 * tall * wide,), generator=generator)
    return PictureTile(start, wide, bytes(pixels.tolist()))


def build_whole(folder: Path, token: int = TOKEN, **text: object) -> Path:
    _build(folder, "Qwen3_5Moe", token, {**TEXT, **text}, VISION)
    _add_predictor(folder / "model.safetensors")
    return folder


def build_deep(folder: Path, token: int = TOKEN, **text: object) -> Path:
    """With experts as published: transformers turns them over as it reads them, and only then."""
    file = _build(folder, "Qwen3VLMoe", token, {**DEEP_TEXT, **text}, DEEP_VISION) / "model.safetensors"
    tensors = load_file(file)
    save_file({name: turned(name, one) for name, one in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor


def _build(folder: Path, kind: str, token: int, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(6)
    config = getattr(transformers, f"{kind}Config")
    made = config(text_config=text, vision_config=vision, image_token_id=token)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(made)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("bias") or tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return folder


def _add_predictor(file: Path) -> None:
    """A layer of multi-token prediction that is as the last one, over the model's row and the next token's."""
    tensors = load_file(file)
    last, hidden = f"model.language_model.layers.{TEXT['num_hidden_layers'] - 1}.", TEXT["hidden_size"]
    alike = {name.removeprefix(last): one for name, one in tensors.items() if name.startswith(last)}
    tensors |= {f"mtp.layers.0.{name}": one.clone() for name, one in alike.items()}
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    tensors |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in norms}
    tensors["mtp.fc.weight"] = torch.eye(hidden).repeat(1, 2)
    save_file(tensors, file, metadata={"format": "pt"})


class SeeingWhole:
    """Transformers' model over prompts with pictures."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._tiles: Sequence[PictureTile] = ()

    def see(self, request: GenerationRequest) -> None:
        """What is computed from now on begins with this prompt."""
        self._tiles = request.tiles

    def continued(self, request: GenerationRequest, guessed: list[int]) -> list[int]:
        self.see(request)
        return greedy.continued(self, request.prompt_ids, request.params.max_tokens, guessed)

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> Any:
        inner = self._model.model
        x, kind, at = inner.get_input_embeddings()(ids), torch.zeros_like(ids), list[int]()
        grids, more = torch.zeros(0, 3, dtype=torch.int64), dict[str, Any]()
        if self._tiles:
            pixels, grids = self._patches()
            for tile, (_, tall, wide) in zip(self._tiles, grids.tolist(), strict=True):
                at += range(tile.start, tile.start + tall * wide // 4)
            seen = inner.get_image_features(pixels, grids, return_dict=True)
            x[0, at], kind[0, at] = torch.cat(seen.pooler_output), 1
            if deep := getattr(seen, "deepstack_features", None):
                more = {"visual_pos_masks": kind.bool(), "deepstack_visual_embeds": [*map(torch.cat, deep)]}
        places, _ = inner.get_rope_index(ids, kind, grids)
        rows = inner.language_model(inputs_embeds=x, position_ids=places, use_cache=use_cache, **more)
        return SimpleNamespace(logits=self._model.lm_head(rows.last_hidden_state))

    def _patches(self) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil(**READS, do_resize=False)
        planes = [
            torch.frombuffer(bytearray(one.pixels), dtype=torch.uint8).view(3, one.tall, one.wide).numpy()
            for one in self._tiles
        ]
        read = processor(planes, return_tensors="pt", input_data_format="channels_first")
        return read["pixel_values"], read["image_grid_thw"]
