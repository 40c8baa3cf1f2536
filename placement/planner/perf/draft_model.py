"""A small model that drafts, as the planner counts it: every layer it has, in one pass for each drafted token."""

from dataclasses import replace

from afserve.errors import ConfigError
from afserve.placement.planner.perf.drafting import DrafterCosts
from afserve.placement.planner.perf.shape_attention import attention_layers
from afserve.spec import ModelSpec
from afserve.spec_parts import DenseSpec

MODEL = "model"


def model_drafter(spec: ModelSpec, folder: str) -> DrafterCosts:
    """Raises ConfigError where the model in `folder` has experts: which of them are read hangs on the batch."""
    if spec.moe_layer_ids:
        raise ConfigError(
            f"--draft model: {folder}: {spec.family} has experts, and plans count draft models without; take one of "
            "the same tokenizer such as Qwen3-0.6B, or measure with afserve up",
            param="draft",
        )
    layers = [spec.layer(number) for number in range(spec.layers)]
    inner = max(layer.ffn.inner for layer in layers if isinstance(layer.ffn, DenseSpec))
    groups = tuple(
        replace(group, weight_elems=group.weight_elems + 3 * spec.hidden * inner)
        for group in attention_layers((layer.attention for layer in layers), spec.hidden)
    )
    return DrafterCosts(
        MODEL, layers=spec.layers, vocabulary=spec.vocab_size, hidden=spec.hidden, groups=groups
    )
