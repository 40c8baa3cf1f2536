"""The head that `--draft` names, over the model that it drafts for."""

from afserve.drafts import DraftChoice
from afserve.families.drafters.dflash import DflashSpec
from afserve.families.drafters.dspark import DsparkSpec
from afserve.families.drafters.read import load_head
from afserve.models.beside import DraftHead, HeadTensors
from afserve.models.decoder import AttentionModel
from afserve.models.drafters.dflash import DflashHead
from afserve.models.drafters.dspark import DsparkHead
from afserve.models.drafters.eagle import EagleHead


def open_draft_head(draft: DraftChoice, model: AttentionModel) -> DraftHead:
    """Raises CheckpointError, and ConfigError for one that is of another model."""
    spec = load_head(draft, model.spec)
    tensors = HeadTensors(draft.head, spec, model.beside())
    if isinstance(spec, DsparkSpec):
        return DsparkHead(tensors, spec)
    if isinstance(spec, DflashSpec):
        return DflashHead(tensors, spec)
    return EagleHead(tensors, spec)
