"""The table of families: `model_type` -> names of tensors. Shapes and rules are read by `spec.py`."""

from afserve.models import deepseek_v2, deepseek_v3, mixtral, qwen3_moe
from afserve.models.naming import Naming
from afserve.spec import FAMILIES

NAMINGS: dict[str, Naming] = {
    "deepseek_v3": deepseek_v3.NAMING,
    "deepseek_v2": deepseek_v2.NAMING,
    "qwen3_moe": qwen3_moe.NAMING,
    "mixtral": mixtral.NAMING,
}
assert set(NAMINGS) == set(FAMILIES), "spec.py and registry.py list different families"
