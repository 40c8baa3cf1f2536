"""Who guesses behind the steps of a node's micro-batches: a layer, a head, a small model, or nobody."""

from collections.abc import Sequence

from afserve.clock import Clock
from afserve.config import EngineConfig
from afserve.engine.draft.block_loop import BlockLoop
from afserve.engine.draft.draft_model import DraftModel
from afserve.engine.draft.layer import EagleLayer, MtpLayer
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.draft.layer_loop import LayerLoop
from afserve.engine.draft.model_loop import ModelLoop
from afserve.engine.kv.cache import KvCache
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.runner import PredictorRunner, T
from afserve.models.decoder import AttentionModel
from afserve.models.drafters.dflash import DflashHead
from afserve.models.drafters.eagle import EagleHead

Follower = LayerLoop[T] | BlockLoop[T] | ModelLoop


def following(follower: Follower[T] | None) -> Follower[T] | None:
    """None where it does not follow the next step: it rests, and does not read on meanwhile."""
    return follower if follower is not None and (follower.drafter.awake or follower.reads_on) else None


def open_followers(
    drafter: LayerDrafter | None,
    draft_model: DraftModel | None,
    model: AttentionModel,
    kv: KvCache,
    runners: Sequence[PredictorRunner[T]],
    blocks: SequenceBlocks,
    load: ExpertLoad,
    config: EngineConfig,
    clock: Clock | None,
) -> Sequence[Follower[T] | None]:
    """One for each runner; None without a drafter. Without a `draft_model` it is a layer of `model`, or the head."""
    if drafter is None:
        return [None] * len(runners)
    if draft_model is not None:
        return [ModelLoop(drafter, draft_model, clock)] * len(runners)
    head, longest = model.head, config.max_model_len
    if isinstance(head, DflashHead):
        own = drafter, head, kv.beside, model.ops
        return [BlockLoop(*own, runner, blocks, longest) for runner in runners]
    if isinstance(head, EagleHead):
        eagle = [EagleLayer(head, kv.beside, model.ops, runner) for runner in runners]
        return [LayerLoop(drafter, layer, blocks, load, longest, layer.keep_keys) for layer in eagle]
    mtp = [MtpLayer(model, runner) for runner in runners]
    return [LayerLoop(drafter, layer, blocks, load, longest, sections=model.sections) for layer in mtp]
