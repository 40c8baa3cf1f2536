"""Tiny models that see, prompts with tiles of random pixels, and what transformers says of them; first Llama 4."""

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import afserve
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.tiles import PictureTile
from tests.engine import greedy
from tests.families import whole_pictures
from tests.families.tiny import LOCAL

TOKEN, SIDE, ROWS = 210, 24, 9
TEXT = {
    **LOCAL, "head_dim": 16, "intermediate_size_mlp": 56, "num_experts_per_tok": 1, "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 32, "floor_scale": 16, "attn_scale": 0.3,
}  # fmt: skip
VISION = {
    "image_size": SIDE, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "projector_input_dim": 12, "projector_output_dim": 12, "vision_output_dim": 12,
    "initializer_range": 0.4, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip


_NAMES = ("image_start", "image_end", "image", "patch", "tile_x_separator", "tile_y_separator")
MARKS = [f"<|{name}|>" for name in _NAMES]
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == "image" %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True)
class Sight:
    """A family that sees: a tiny checkpoint of it, transformers' model, its pictures by seed, and how it is asked. The
    rows of a picture stand for `marks[row]`."""

    build: Callable[..., Path]
    seeing: Callable[[Path], Any]
    tile: Callable[[int, int], PictureTile]
    rows: Callable[[int], int]
    marks: Sequence[str]
    row: str
    template: str
    reads: dict[str, object] = field(default_factory=dict)  # preprocessor_config.json
    drafts: Sequence[str] = ("suffix:3",)

    def request(self, handle: int, parts: list[int | list[int]], params: SamplingParams) -> GenerationRequest:
        """`parts` in order: a list of tokens, or the seed of a picture."""
        ids: list[int] = []
        tiles = []
        for part in parts:
            if isinstance(part, int):
                tiles.append(self.tile(part, len(ids)))
                ids += [TOKEN] * self.rows(part)
            else:
                ids += part
        return GenerationRequest(handle, tuple(ids), params, tiles=tuple(tiles))


def build_talking(folder: Path, sight: str = "llama4") -> Path:
    """With nano's words, and marks of pictures behind them."""
    seen = SIGHTS[sight]
    nano = Path(afserve.__file__).parent / "configs" / "nano"
    words = json.loads((nano / "tokenizer.json").read_text())
    size, plain = len(words["model"]["vocab"]), words["added_tokens"][0]
    words["added_tokens"] += [
        {**plain, "id": size + at, "content": mark} for at, mark in enumerate(seen.marks)
    ]
    token, vocabulary = size + seen.marks.index(seen.row), size + len(seen.marks)
    seen.build(folder, token, vocab_size=vocabulary, max_position_embeddings=1024)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "tokenizer_config.json").write_text((nano / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(seen.template)
    (folder / "preprocessor_config.json").write_text(json.dumps(seen.reads))
    return folder


def build_seeing(folder: Path, token: int = TOKEN, **text: object) -> Path:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(4)
    made = transformers.Llama4Config(
        text_config={**TEXT, **text}, vision_config=VISION, image_token_index=token
    )
    model = transformers.Llama4ForConditionalGeneration(made)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("bias") or tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return folder


class Seeing:
    """Transformers' model over prompts whose first image tokens are those of `tiles`."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._model = transformers.Llama4ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._features = torch.zeros(0)

    def continued(self, request: GenerationRequest, guessed: list[int]) -> list[int]:
        self.see(request)
        return greedy.continued(self, request.prompt_ids, request.params.max_tokens, guessed)

    def see(self, request: GenerationRequest) -> None:
        """What is computed from now on begins with this prompt."""
        model, tiles = self._model, [Seeing._pixels(tile) for tile in request.tiles]
        if tiles:
            with torch.no_grad():
                seen = model.get_image_features(torch.stack(tiles), return_dict=True).last_hidden_state
                self._features = model.multi_modal_projector(seen.flatten(0, 1))
        else:
            self._features = torch.zeros(0)

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> Any:
        x = self._model.get_input_embeddings()(ids)
        at = (ids[0] == self._model.config.image_token_id).nonzero()[: len(self._features), 0]
        x[0, at] = self._features.to(x.dtype).view(-1, x.shape[-1])
        return self._model.language_model(inputs_embeds=x, use_cache=use_cache)

    @staticmethod
    def _pixels(tile: PictureTile) -> torch.Tensor:
        """As Llama4ImageProcessor rescales and normalises them."""
        raw = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, SIDE, SIDE)
        return (raw.to(torch.bfloat16) * (1 / 255)).sub(0.5).div(0.5).float()


def data_url(width: int, height: int, seed: int = 0, kind: str = "PNG") -> str:
    """A picture of smooth random colours."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(0, 256, (5, 7, 3), generator=generator, dtype=torch.uint8)
    made, file = Image.fromarray(few.numpy()).resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    made.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def tile(seed: int, start: int) -> PictureTile:
    generator = torch.Generator().manual_seed(seed)
    return PictureTile(
        start, SIDE, bytes(torch.randint(0, 256, (3 * SIDE**2,), generator=generator).tolist())
    )


def _whole(build: Callable[..., Path], drafts: Sequence[str]) -> Sight:
    return Sight(
        build,
        whole_pictures.SeeingWhole,
        whole_pictures.tile,
        lambda seed: math.prod(whole_pictures.GRIDS[seed]),
        whole_pictures.MARKS,
        "<|image_pad|>",
        whole_pictures.TEMPLATE,
        whole_pictures.READS,
        drafts,
    )


SIGHTS = {
    "llama4": Sight(build_seeing, Seeing, tile, lambda seed: ROWS, MARKS, "<|patch|>", TEMPLATE),
    "qwen3_5": _whole(whole_pictures.build_whole, ("suffix:3", "mtp:2")),
    "qwen3_vl": _whole(whole_pictures.build_deep, ("suffix:3",)),
}
