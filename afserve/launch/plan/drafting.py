"""What is served of a checkpoint: its layers, and with `--draft mtp` its layer of multi-token prediction."""

from pathlib import Path

from afserve.config import ModelSource
from afserve.drafts import DraftChoice
from afserve.errors import ConfigError
from afserve.families.table import naming_of, served_spec
from afserve.models.shards import stored_names
from afserve.spec import ModelSpec


def planned_spec(source: ModelSource, draft: DraftChoice) -> ModelSpec:
    """As every node will load it. Raises ConfigError where `draft` needs tensors that the checkpoint has not: many
    copies of one lack them, and their config.json still has the number of such layers."""
    spec = served_spec(source, draft)
    naming = naming_of(spec)
    if not spec.predictors or source.load_format == "dummy" or naming.predictor is None:
        return spec
    join = naming.layer(spec.layers, naming.predictor.join)
    names, stem = stored_names(Path(source.path)), join.removesuffix("weight")
    if not any(name.startswith(stem) for name in names):
        raise ConfigError(
            f"--draft {draft}: {source.path} has no {join}: its layer of multi-token prediction was left out; take a "
            "copy of the checkpoint that has it, or --draft ngram",
            param="draft",
        )
    return spec
