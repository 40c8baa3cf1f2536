"""How a family of models chooses experts, as a value that every backend understands."""

from dataclasses import dataclass
from enum import Enum


class Scoring(Enum):
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    TOPK_SOFTMAX = "topk_softmax"  # top-k of the logits, softmax over those k (gpt_oss)
    SPARSE_MIXER = "sparse_mixer"  # two experts one after the other, each weighed among near ones (phimoe)


class Selection(Enum):
    PLAIN = "plain"
    GROUP_TOP2_SUM = "group_top2_sum"  # deepseek_v3: a group is worth the sum of its two best
    GROUP_MAX = "group_max"  # deepseek_v2: a group is worth its best


@dataclass(frozen=True, slots=True)
class RouterRule:
    """`closed_value` replaces scores of groups not chosen (transformers: 0.0 or -inf by family); `jitter` is how near
    a logit is to the best one for the sparse mixer."""

    top_k: int
    scoring: Scoring
    selection: Selection = Selection.PLAIN
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    closed_value: float = 0.0
    jitter: float = 0.0

    def __hash__(self) -> int:
        """Of few fields, since it is asked at every layer of a step."""
        return hash((self.top_k, self.groups, self.scale))
