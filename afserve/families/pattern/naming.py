"""What a family calls its tensors. The defaults are the names that most checkpoints of Hugging Face use."""

from dataclasses import dataclass

Names = tuple[str, str, str]
_PARTS = ("gate_proj", "up_proj", "down_proj")
ROUTED = (
    ".experts.",
    ".block_sparse_moe.input_linear.",
    ".block_sparse_moe.output_linear.",
    ".moe.gate_proj.",
    ".moe.up_proj.",
    ".moe.down_proj.",
    "_exps.",
    ".ngram_embeddings.embedders.",
)
"""What names of tensors have in them that expert nodes read, those of routed experts and of look-up tables; attention
nodes read all others."""


@dataclass(frozen=True, slots=True)
class StackedNames:
    """Experts that lie in tensors of all experts, below `moe`. An expert's gate and up are (I, H), its down is (H, I).

    `gate_up` holds both, gate first, or every other one where they are `interleaved`; or `up` is a tensor of its own.
    With `transposed` the last two dimensions of what both hold are swapped. `flat`: no dimension for experts, their
    rows lie one after the other, and down is stored as gate and up are. Biases are called `NAME_bias`. `sometimes`:
    other checkpoints of the family have a gate, an up and a down for each expert.
    """

    gate_up: str
    down: str
    up: str = ""
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    sometimes: bool = False


@dataclass(frozen=True, slots=True)
class PredictorNames:
    """What a layer of multi-token prediction has beside a decoder layer's tensors: norms of the embedding and of the
    hidden row, what joins both, and the norm before the head. They are below the `stem`, and the decoder layer's below
    its `layers.0.`; without one both are below a further layer's. `field` of config.json has the number of such layers;
    where it has none, the tensors tell. A `narrow` one has a window and no experts, though others of the model have;
    `post_norm`: what it calls the norm before its FFN, where that is a name of its own."""

    embedding_norm: str = "enorm.weight"
    hidden_norm: str = "hnorm.weight"
    join: str = "eh_proj.weight"
    last_norm: str = "shared_head.norm.weight"
    stem: str = ""
    field: str = "num_nextn_predict_layers"
    narrow: bool = False
    post_norm: str = ""


PREDICTOR_APART = PredictorNames(
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "fc.weight",
    "norm.weight",
    stem="mtp",
    field="",
)


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Maps of latent attention, and the norm of its latent."""

    query: str = "q_proj.weight"
    down: str = "kv_a_proj_with_mqa.weight"
    norm: str = "kv_a_layernorm.weight"
    up: str = "kv_b_proj.weight"
    log_scale: str = "softmax_scaling.scale"
    log_bias: str = "softmax_scaling.bias"


@dataclass(frozen=True, slots=True)
class Naming:
    """`stem` holds the decoder; the other names but `head` are below `stem.layers.<i>.`, or below `moe` there.
    Where a layer of the checkpoint is several of ours, its `parts`, `{part}` in a name is the number of one of them.

    Projections of attention are `q_proj`, `k_proj`, `v_proj` or one `qkv`; MLA's are DeepSeek's. A bias is called as
    its weight with another ending. An expert has a `gate`, an `up` and a `down` of its own, unless they are `stacked`.
    """

    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: StackedNames | None = None
    shared: str = "shared_experts"  # without a name it is called as a dense FFN is
    shared_gate: str = "shared_expert_gate.weight"
    router_weight: str = "gate.weight"
    correction_bias: str = "gate.e_score_correction_bias"
    correction_row: bool = False  # stored as a matrix of one row
    correction_sometimes: bool = False  # a checkpoint without it has zeros
    dense_ffn: str = "mlp"
    dense_parts: Names = _PARTS
    shared_parts: Names = _PARTS  # of the same name twice both are one tensor, gate first
    into_latent: str = "fc1_latent_proj"  # of rows, where experts work in one
    from_latent: str = "fc2_latent_proj"  # of their sum
    attention: str = "self_attn"
    linear: str = "linear_attn"
    linear_parts: bool = False  # a gated delta net has a tensor for each of its projections
    qkv: str = ""
    out: str = "o_proj"
    q_norm: str = "q_norm.weight"
    k_norm: str = "k_norm.weight"
    sinks: str = "sinks"
    output_gate: str = "g_proj"  # where it is a projection of its own
    input_norm: str = "input_layernorm.weight"
    post_norm: str = "post_attention_layernorm.weight"
    after_attention: str = ""  # norms of what a half adds, where there are such
    after_ffn: str = "post_mlp_layernorm.weight"
    before_shared: str = "pre_feedforward_layernorm.weight"  # where experts are `apart`
    after_shared: str = "post_feedforward_layernorm_1.weight"
    after_routed: str = "post_feedforward_layernorm_2.weight"
    router_norm: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    layer_scale: str = "layer_scalar"
    stem: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens.weight"
    table: str = "ngram_embeddings.embedders"  # of a look-up table, for each head
    table_map: str = "ngram_embeddings.post_projs"  # from a head's rows to the hidden size
    last_norm: str = "norm.weight"
    head: str = "lm_head.weight"
    rope_factors: str = "model.rotary_emb.alpha"  # where a rotary embedding has learned ones
    latent: LatentNames = LatentNames()
    predictor: PredictorNames | None = None  # of the layer behind the last one; None: not known
    layer_count: int | None = None  # of the model, where its predictor's is loaded too
    parts: int = 1
    count_field: str = "num_hidden_layers"  # of config.json: layers of the checkpoint

    @property
    def embedding(self) -> str:
        return self._below(self.embed)

    @property
    def final_norm(self) -> str:
        return self._below(self.last_norm)

    def table_rows(self, head: int) -> str:
        return self._below(f"{self.table}.{head}.weight")

    def table_maps(self, head: int) -> str:
        return self._below(f"{self.table_map}.{head}.weight")

    def layer(self, layer: int, rest: str) -> str:
        if layer == self.layer_count and self.predictor is not None and self.predictor.stem:
            rest = self.predictor.post_norm or rest if rest == self.post_norm else rest
            return f"{self.predictor.stem}.layers.0.{rest}"
        whole, part = divmod(layer, self.parts)
        return self._below(f"{self.layers}.{whole}.{rest.replace('{part}', str(part))}")

    def _below(self, name: str) -> str:
        return f"{self.stem}.{name}" if self.stem else name

    def of_predictor(self, layer: int, name: str) -> str:
        """One of its names; `layer` is where it stands."""
        stem = self.predictor.stem if self.predictor else ""
        return f"{stem}.{name}" if stem else self.layer(layer, name)

    def router(self, layer: int) -> str:
        return self.in_moe(layer, self.router_weight)

    def router_bias(self, layer: int) -> str:
        """The bias that only choosing experts sees."""
        return self.in_moe(layer, self.correction_bias)

    def in_moe(self, layer: int, rest: str) -> str:
        return self.layer(layer, f"{self.moe}.{rest}" if self.moe else rest)

    def expert(self, layer: int, expert: int) -> Names:
        """Gate, up and down of one expert that has tensors of its own; without a gate there is none of that name."""
        return _weights(self.in_moe(layer, f"experts.{expert}"), (self.gate, self.up, self.down))

    def dense(self, layer: int) -> Names:
        return _weights(self.layer(layer, self.dense_ffn), self.dense_parts)

    def shared_expert(self, layer: int) -> Names:
        if not self.shared:
            return self.dense(layer)
        return _weights(self.in_moe(layer, self.shared), self.shared_parts)


def bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _weights(stem: str, parts: Names) -> Names:
    gate, up, down = parts
    return f"{stem}.{gate}.weight", f"{stem}.{up}.weight", f"{stem}.{down}.weight"
