"""What lists of models tell of one: its kind, its size, what it can do. Read from its folder, once."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from afserve.errors import AfserveError
from afserve.families.table import load_spec
from afserve.spec import ModelSpec

_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`size` in bytes, `parameters` a count, `digest` of the configuration and of the weights' names and sizes.

    `spec` is None where the folder has no config.json that is known here.
    """

    size: int
    digest: str
    parameters: int
    spec: ModelSpec | None

    @property
    def family(self) -> str:
        return "moe" if self.spec is None else self.spec.family

    @property
    def quantization(self) -> str:
        """As Ollama calls it: what most weights are stored in."""
        if self.spec is None:
            return ""
        if self.spec.quantization is not None:
            return "INT4"
        short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
        return "F8_E4M3" if self.spec.fp8_block is not None else short.get(self.spec.dtype, "")

    @property
    def parameter_size(self) -> str:
        """In three digits, such as 671B."""
        for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.3g}{name}"
        return ""


@lru_cache(maxsize=256)
def card_of(folder: str) -> ModelCard:
    """Raises nothing: what cannot be read is not told."""
    try:
        spec = load_spec(folder)
    except (AfserveError, OSError):
        spec = None
    sizes: list[tuple[str, int]] = []
    with suppress(OSError):
        files = sorted(Path(folder).glob("*.safetensors"))
        sizes = [(path.name, path.stat().st_size) for path in files if path.is_file()]
    parameters = 0 if spec is None else spec.attention_parameters() + spec.routed_parameters()
    size = sum(size for _, size in sizes) or parameters * _ELEMENT.get("" if spec is None else spec.dtype, 2)
    digest = hashlib.sha256(repr((spec, sizes)).encode()).hexdigest()
    return ModelCard(size, digest, parameters, spec)
