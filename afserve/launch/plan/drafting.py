"""What is served of a checkpoint: its layers, and with `--draft mtp` its layer of multi-token prediction."""

import math
from dataclasses import replace
from pathlib import Path

from afserve.config import EngineSettings, ModelSource
from afserve.drafts import DraftChoice, DraftMethod
from afserve.errors import ConfigError
from afserve.families.eagle import FROM_TARGET, TO_TARGET, EagleSpec, check_tensors, load_eagle
from afserve.families.table import naming_of, served_spec
from afserve.gguf.names import join_of_predictor
from afserve.models.shards import stored_names, stored_shapes
from afserve.spec import ModelSpec


def planned_spec(source: ModelSource, draft: DraftChoice) -> ModelSpec:
    """As every node will load it. Raises ConfigError where `draft` needs tensors that the checkpoint has not: many
    copies of one lack them, and their config.json still has the number of such layers. `auto` takes them where they
    are."""
    if draft.method is DraftMethod.AUTO:
        try:
            return planned_spec(source, replace(draft, method=DraftMethod.MTP))
        except ConfigError:
            return planned_spec(source, replace(draft, method=DraftMethod.SUFFIX))
    spec = served_spec(source, draft)
    if draft.head:
        check_tensors(draft.head, load_eagle(draft.head, spec), stored_shapes(Path(draft.head)))
    naming = naming_of(spec)
    if not spec.predictors or source.load_format == "dummy" or naming.predictor is None:
        return spec
    join = naming.of_predictor(spec.layers, naming.predictor.join)
    if spec.quantization is not None and spec.quantization.gguf:
        join = join_of_predictor(spec.layers)
    names, stem = stored_names(Path(source.path)), join.removesuffix("weight")
    if not any(name.startswith(stem) for name in names):
        raise ConfigError(
            f"--draft {draft}: {source.path} has no {join}: its layer of multi-token prediction was left out; take a "
            "copy of the checkpoint that has it, or --draft ngram",
            param="draft",
        )
    return spec


def head_of(draft: DraftChoice, spec: ModelSpec) -> EagleSpec | None:
    """The head beside a model, where one drafts. Raises CheckpointError or ConfigError."""
    return load_eagle(draft.head, spec) if draft.head else None


def head_numbers(draft: DraftChoice) -> int:
    """How many weights the head beside a model has; 0 without one."""
    shapes = stored_shapes(Path(draft.head)) if draft.head else {}
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in (TO_TARGET, FROM_TARGET))


def decided(engine: EngineSettings, spec: ModelSpec, picked: dict[str, str]) -> str:
    """`--draft` as every node that serves `spec` is told it, with what the banner says of it."""
    draft, told, why = engine.drafts(), engine.draft, ""
    if draft.method is DraftMethod.AUTO:
        draft = replace(draft, method=DraftMethod.MTP if spec.predictors else DraftMethod.SUFFIX)
        told = str(draft)
        why = (
            f", since this checkpoint has {'a' if spec.predictors else 'no'} layer of multi-token prediction"
        )
    if draft.method is not DraftMethod.OFF:
        count = "as many tokens a step as pay" if draft.tokens is None else f"{draft.tokens} tokens a step"
        who = f"{draft.method} of {draft.head}" if draft.head else str(draft.method)
        picked["draft"] = f"{who}, {count}{why}"
        if draft.synthetic:
            picked["draft"] += (
                f", spoiled for a benchmark: {1 + sum(draft.synthetic):g} tokens a step of a right one"
            )
    if draft.passed:
        picked["speculative-config"] = f"without effect here: {', '.join(draft.passed)}"
    return told
