"""What a family calls its tensors: one value per family, built in its own small file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Naming:
    """Names below `model.layers.<i>.`; attention and norms are alike in every supported family."""

    moe: str
    gate: str
    up: str
    down: str
    shared: str = "shared_experts"
    correction_bias: str | None = None

    def layer(self, layer: int, rest: str) -> str:
        return f"model.layers.{layer}.{rest}"

    def router(self, layer: int) -> str:
        return self.layer(layer, f"{self.moe}.gate.weight")

    def router_bias(self, layer: int) -> str:
        return self.layer(layer, f"{self.moe}.{self.correction_bias}")

    def expert(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Gate, up and down of one routed expert."""
        stem = self.layer(layer, f"{self.moe}.experts.{expert}")
        return tuple(f"{stem}.{part}.weight" for part in (self.gate, self.up, self.down))  # type: ignore[return-value]

    def dense(self, layer: int) -> tuple[str, str, str]:
        """Gate, up and down of a dense layer's FFN."""
        return tuple(self.layer(layer, f"mlp.{p}.weight") for p in ("gate_proj", "up_proj", "down_proj"))  # type: ignore[return-value]

    def shared_expert(self, layer: int) -> tuple[str, str, str]:
        stem = self.layer(layer, f"{self.moe}.{self.shared}")
        return tuple(f"{stem}.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj"))  # type: ignore[return-value]
