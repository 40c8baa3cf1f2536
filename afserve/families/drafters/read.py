"""The head that `--draft` names, as its folder describes it: a reader of each kind that `drafts.BESIDE` has."""

from collections.abc import Callable, Mapping

from afserve.drafts import DraftChoice, DraftMethod
from afserve.families.drafters.dflash import DflashSpec, load_dflash
from afserve.families.drafters.dspark import DsparkSpec, load_dspark
from afserve.families.drafters.eagle import EagleSpec, load_eagle
from afserve.spec import ModelSpec

AnyHead = EagleSpec | DflashSpec | DsparkSpec
READERS: Mapping[DraftMethod, Callable[[str, ModelSpec], AnyHead]] = {
    DraftMethod.EAGLE3: load_eagle,
    DraftMethod.DFLASH: load_dflash,
    DraftMethod.DSPARK: load_dspark,
}


def load_head(draft: DraftChoice, target: ModelSpec) -> AnyHead:
    """Of a `draft` with a `head`. Raises CheckpointError or ConfigError that name what is wrong, or does not fit."""
    return READERS[draft.method](draft.head, target)
