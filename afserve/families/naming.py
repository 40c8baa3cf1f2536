"""What a family calls its tensors. The defaults are the names that most checkpoints of Hugging Face use."""

from dataclasses import dataclass

Names = tuple[str, str, str]
_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Naming:
    """`stem` holds the decoder; the other names but `head` are below `stem.layers.<i>.`, or below `moe` there.

    Projections of attention are `q_proj`, `k_proj`, `v_proj`, `o_proj`, MLA's are DeepSeek's. Whatever has `.experts.`
    in its name is a routed expert's, and expert nodes read it; attention nodes read the rest.
    """

    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    router_weight: str = "gate.weight"
    correction_bias: str = "gate.e_score_correction_bias"
    attention: str = "self_attn"
    input_norm: str = "input_layernorm.weight"
    post_norm: str = "post_attention_layernorm.weight"
    stem: str = "model"
    head: str = "lm_head.weight"

    @property
    def embedding(self) -> str:
        return f"{self.stem}.embed_tokens.weight"

    @property
    def final_norm(self) -> str:
        return f"{self.stem}.norm.weight"

    def layer(self, layer: int, rest: str) -> str:
        return f"{self.stem}.layers.{layer}.{rest}"

    def router(self, layer: int) -> str:
        return self.layer(layer, f"{self.moe}.{self.router_weight}")

    def router_bias(self, layer: int) -> str:
        """The bias that only choosing experts sees."""
        return self.layer(layer, f"{self.moe}.{self.correction_bias}")

    def expert(self, layer: int, expert: int) -> Names:
        """Gate, up and down of one routed expert."""
        return _weights(self.layer(layer, f"{self.moe}.experts.{expert}"), (self.gate, self.up, self.down))

    def dense(self, layer: int) -> Names:
        """Gate, up and down of a dense layer's FFN."""
        return _weights(self.layer(layer, "mlp"), _PARTS)

    def shared_expert(self, layer: int) -> Names:
        return _weights(self.layer(layer, f"{self.moe}.{self.shared}"), _PARTS)


def _weights(stem: str, parts: Names) -> Names:
    gate, up, down = parts
    return f"{stem}.{gate}.weight", f"{stem}.{up}.weight", f"{stem}.{down}.weight"
