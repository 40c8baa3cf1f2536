"""The shape of nano and of its training run: every number that decides the checkpoint, in one place.

Knows no tensor and no file. `architecture()` is the `config.json` that Hugging Face reads.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BEGIN, END = range(3)


@dataclass(frozen=True, slots=True)
class Shape:
    """DeepSeek-V3 in small: one dense layer, four MoE layers, one multi-token-prediction module."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 5
    dense_layers: int = 1
    dense_inter: int = 384
    heads: int = 4
    q_rank: int = 96
    kv_rank: int = 64
    nope: int = 32
    rope: int = 32
    value: int = 64
    experts: int = 32
    expert_inter: int = 32
    shared: int = 1
    top_k: int = 4
    groups: int = 4
    top_groups: int = 2
    scale: float = 2.0
    theta: float = 2000.0
    eps: float = 1e-6
    positions: int = 4096

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    @classmethod
    def read(cls, c: dict[str, Any]) -> "Shape":
        """The shape of a `config.json` written by `architecture`."""
        return cls(
            vocab=c["vocab_size"],
            hidden=c["hidden_size"],
            layers=c["num_hidden_layers"],
            dense_layers=c["first_k_dense_replace"],
            dense_inter=c["intermediate_size"],
            heads=c["num_attention_heads"],
            q_rank=c["q_lora_rank"],
            kv_rank=c["kv_lora_rank"],
            nope=c["qk_nope_head_dim"],
            rope=c["qk_rope_head_dim"],
            value=c["v_head_dim"],
            experts=c["n_routed_experts"],
            expert_inter=c["moe_intermediate_size"],
            shared=c["n_shared_experts"],
            top_k=c["num_experts_per_tok"],
            groups=c["n_group"],
            top_groups=c["topk_group"],
            scale=c["routed_scaling_factor"],
            theta=c["rope_theta"],
            eps=c["rms_norm_eps"],
            positions=c["max_position_embeddings"],
        )

    def architecture(self) -> dict[str, object]:
        """`config.json` in the field names of transformers' DeepseekV3Config."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "first_k_dense_replace": self.dense_layers,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.dense_inter,
            "kv_lora_rank": self.kv_rank,
            "max_position_embeddings": self.positions,
            "moe_intermediate_size": self.expert_inter,
            "moe_layer_freq": 1,
            "n_group": self.groups,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": self.q_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "rms_norm_eps": self.eps,
            "rope_interleave": True,
            "rope_scaling": None,
            "rope_theta": self.theta,
            "routed_scaling_factor": self.scale,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": self.top_groups,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "v_head_dim": self.value,
            "vocab_size": self.vocab,
        }


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a stage: its share of the steps, the length of its windows of text, the share of conversations."""

    share: float
    length: int
    taught: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a stage is trained. Steps are fixed, never a time limit, so the run repeats.

    `tokens` of text and conversations make a step. Only parameters whose names begin with `learns` are trained.
    `chain`, where it is not 0, is how many passes of the MTP module follow each other, and the module is taught what
    the model itself would say next; 0 teaches it the text.
    """

    seed: int = 20251
    steps: int = 900
    tokens: int = 4096
    phases: tuple[Phase, ...] = (Phase(0.75, 512), Phase(0.17, 1024), Phase(0.08, 2048))
    rates: tuple[tuple[int, float], ...] = ((-1, 0.0), (59, 1.0), (432, 1.0), (600, 0.806452), (900, 0.0))
    muon_lr: float = 0.015
    muon_decay: float = 0.8
    decay_from: int = 600
    embed_lr: float = 0.005
    head_lr: float = 0.003
    small_lr: float = 0.003
    mtp_weight: float = 0.2
    bias_step: float = 0.003
    band: tuple[float, float] = (0.4, 2.5)
    facts: int = 0
    lesson_length: int = 128
    learns: str = ""
    chain: int = 0

    def rate(self, step: int) -> float:
        """Learning-rate factor: straight lines between the knots of `rates`, squeezed when `steps` is."""
        place = step * self.rates[-1][0] / self.steps
        for (start, low), (stop, high) in pairwise(self.rates):
            if place <= stop:
                return low + (high - low) * (place - start) / (stop - start)
        return self.rates[-1][1]

    def momentum(self, step: int) -> float:
        """Muon's momentum, 0.85 to 0.95 over the first 200 steps."""
        return 0.85 + 0.10 * min(1.0, step / 200)

    def decay(self, step: int) -> float:
        """Muon's weight decay, in shares of its rate: it holds spectral norms near 1 / muon_decay."""
        return self.muon_decay if step >= self.decay_from else 0.0

    def phase(self, step: int) -> Phase:
        """Short windows first, long last."""
        edge = 0.0
        for phase in self.phases:
            edge += phase.share * self.steps
            if step < edge - 1e-9:
                return phase
        return self.phases[-1]

    def text_rows(self, step: int) -> int:
        """Windows of text in this step."""
        phase = self.phase(step)
        return round(self.tokens * (1 - phase.taught)) // phase.length

    def lesson_rows(self, step: int) -> int:
        """Conversations in this step."""
        return round(self.tokens * self.phase(step).taught) // self.lesson_length


TEXT = Recipe()
FACTS = Recipe(
    seed=20252,
    steps=1000,
    phases=(Phase(0.4, 512, 0.75), Phase(0.4, 1024, 0.5), Phase(0.2, 2048, 0.5)),
    rates=((-1, 0.0), (50, 0.6), (400, 0.6), (1000, 0.0)),
    decay_from=0,
    facts=1700,
)
DRAFTS = Recipe(
    seed=20253,
    steps=400,
    phases=(Phase(0.4, 512, 0.25), Phase(0.4, 1024, 0.25), Phase(0.2, 2048, 0.25)),
    rates=((-1, 0.0), (20, 0.4), (400, 0.0)),
    mtp_weight=1.0,
    decay_from=0,
    learns="mtp.",
    chain=3,
)
