"""What is served of a checkpoint: its layers, with `--draft mtp` its layer of multi-token prediction, and whether what
stands beside it to draft, a head or a small model, fits it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from afserve.config import EngineSettings, ModelSource
from afserve.drafts import DraftChoice, DraftMethod
from afserve.errors import ConfigError, shown
from afserve.families.drafters.dense import draft_model_spec
from afserve.families.drafters.dflash import DflashSpec
from afserve.families.drafters.heads import FROM_TARGET, TO_TARGET, check_tensors
from afserve.families.drafters.read import load_head
from afserve.families.table import naming_of, served_spec
from afserve.gguf.names import join_of_predictor
from afserve.models.shards import stored_names, stored_shapes
from afserve.spec import ModelSpec
from afserve.tokens.tokenizer import Tokenizer


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
        check_head(draft, spec)
    if draft.model:
        draft_model_spec(draft.model)
        check_same_tokens(source.path, draft.model)
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


def check_head(draft: DraftChoice, spec: ModelSpec) -> None:
    """Raises CheckpointError or ConfigError where the head is none for this model, or drafts fewer tokens."""
    head = load_head(draft, spec)
    check_tensors(draft.head, head, stored_shapes(Path(draft.head)))
    if isinstance(head, DflashSpec) and (draft.tokens or 0) > head.guesses:
        raise ConfigError(
            f"--draft {draft}: of block_size {head.block}: it guesses {head.guesses} tokens at most; write "
            f"{draft.method}:{draft.folder}:{head.guesses}",
            param="draft",
        )


def check_same_tokens(served: str, small: str) -> None:
    """Raises ConfigError where a token is another one of the draft model's, or one that it has not; tokens that were
    added to the served model's, such as those of a chat, it need not have."""
    tokenizer = Tokenizer.from_folder(served)
    if not (Path(small) / "tokenizer.json").is_file():
        refuse_model(
            f"{small} has no tokenizer.json, so whether its tokens are those of {served} is not known"
        )
    ids, theirs = tokenizer.ids, Tokenizer.from_folder(small).ids
    again = f"take a draft model of the same tokenizer as {served}, or --draft suffix"
    for token, number in sorted(ids.items(), key=lambda one: one[1]):
        found = theirs.get(token)
        if found is None and number not in tokenizer.added_ids:
            refuse_model(f"{small} has no token {shown(token)}, which is {number} of {served}; {again}")
        if found not in (None, number):
            refuse_model(f"{shown(token)} is token {found} of {small}, and {number} of {served}; {again}")


def refuse_model(why: str) -> NoReturn:
    raise ConfigError(f"--draft model: {why}", param="draft")


def bytes_beside(draft: DraftChoice, spec: ModelSpec, element: int) -> int:
    """What a head or a draft model keeps of a token of KV, in numbers of so many bytes; 0 without one. Raises
    CheckpointError or ConfigError."""
    if draft.model:
        return draft_model_spec(draft.model).kv_bytes_per_token(element)
    return load_head(draft, spec).kv_bytes(element) if draft.head else 0


def numbers_beside(draft: DraftChoice) -> int:
    """How many weights a head or a draft model has; 0 without one."""
    shapes = stored_shapes(Path(draft.folder)) if draft.folder else {}
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in (TO_TARGET, FROM_TARGET))


def decided(engine: EngineSettings, spec: ModelSpec, picked: dict[str, str]) -> str:
    """`--draft` as every node that serves `spec` is told it, with what the banner says of it.

    Who says nothing has `suffix` on CPUs, where it was measured to cost nothing on texts that do not repeat, and no
    drafts on GPUs, where nothing has been measured.
    """
    draft, told, why = engine.drafts(), engine.draft, ""
    if not told and not engine.speculative_config and engine.device == "cpu":
        draft, told = DraftChoice(DraftMethod.SUFFIX), str(DraftMethod.SUFFIX)
    elif draft.method is DraftMethod.AUTO:
        draft = replace(draft, method=DraftMethod.MTP if spec.predictors else DraftMethod.SUFFIX)
        told = str(draft)
        why = (
            f", since this checkpoint has {'a' if spec.predictors else 'no'} layer of multi-token prediction"
        )
    if draft.method is not DraftMethod.OFF:
        count = "as many tokens a step as pay" if draft.tokens is None else f"{draft.tokens} tokens a step"
        who = f"{draft.method} of {draft.folder}" if draft.folder else str(draft.method)
        picked["draft"] = f"{who}, {count}{why}"
        if draft.synthetic:
            picked["draft"] += (
                f", spoiled for a benchmark: {1 + sum(draft.synthetic):g} tokens a step of a right one"
            )
    if draft.passed:
        picked["speculative-config"] = f"without effect here: {', '.join(draft.passed)}"
    return told
