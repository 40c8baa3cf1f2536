"""The parts of a model's shape: one decoder layer with its attention and its FFN. Plain numbers, no torch.

The files of `families/` fill them from a `config.json`. They say what a model is, also where no kernel runs it:
`families/limits.py` says what the engine can run, and the planner plans with all of it.
"""

from dataclasses import dataclass
from typing import Literal

CLAMPED_SWIGLU, BOUNDED_SWIGLU = "clamped_swiglu", "bounded_swiglu"
SQUARED_RELU = "relu2"


def projections_of(activation: str) -> int:
    """Linear maps of an FFN: gate, up and down, or two where there is no gate."""
    return 2 if activation == SQUARED_RELU else 3


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dim` numbers of a head; a `dim` below the head's size is a partial one.

    `kind` is config.json's `rope_type` ("default", "linear", "yarn", "longrope" ...); `factor` is linear's and yarn's,
    the fields after it are yarn's, then llama3's two, and longrope's: divisors and a factor of cos and sin for contexts
    up to `original_max`, and others for longer ones. Of kind "proportional" only the `partial` first frequencies are
    not 0. `learned`: frequencies are multiplied by the exponentials of numbers of the checkpoint (LeRoPE)."""

    kind: str
    theta: float
    dim: int
    interleaved: bool
    factor: float = 1.0
    original_max: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float = 1.0
    long_mscale: float = 1.0
    partial: float = 1.0
    learned: bool = False


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """DeepSeek's sparse attention: `heads` of `dim` score every cached token, the `top` best are attended. The rotary
    embedding turns neighbours where it is `interleaved`. A layer that `reuses` has no indexer, and attends what the
    last layer with one chose. With queries of its `own` these are made of the row itself behind a LayerNorm, not of
    what attention's are made of, and scaled as `log_scaled` says of those.

    With a `block` it is MiniMax M3's: each key head attends the `top` best aligned blocks of so many tokens, among them
    the last `local` ones; of `heads` there is one for each key head."""

    heads: int
    dim: int
    top: int
    interleaved: bool = False
    reuses: bool = False
    block: int = 0
    local: int = 0
    own: bool = False

    @property
    def reach(self) -> int:
        """Tokens that are attended at most."""
        return self.top * max(self.block, 1)

    @property
    def kept(self) -> int:
        """Cached numbers per token and layer."""
        return 0 if self.reuses else self.dim


@dataclass(frozen=True, slots=True)
class GateSpec:
    """What multiplies what heads saw: the sigmoid, or the `softplus`, of a map of the normalised row. It is made by the
    `query` projection, a head's gate behind its query, or by one of its own, for each of a head's `numbers` or a number
    for each of `heads`."""

    by: Literal["query", "numbers", "heads"]
    softplus: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention; sizes are per head.

    - `gqa`: `kv_heads` key and value heads shared by `heads` query heads.
    - `mla`: multi-head latent attention; `head_dim` is `nope_dim` + `rope_dim`, and `kv_heads` 1.
    - `mfa`: multi-matrix factorization (Step-3): the query goes through `q_lora_rank`, `kv_heads` are its groups.
    - `linear`: a state of `head_dim` x `value_dim` for each of `heads` value heads; `kv_heads` are its key heads. Its
      inputs pass a convolution of `taps` tokens; others, without one (0), are only planned for. By its `rule` it is a
      gated delta net that forgets by `head`, or by `channel` of a key, or adds values (`sum`, Mamba-2). One by channel
      makes decays and its gate by two maps each, or a `direct` one; logarithms of its decays are sigmoids times a
      `floor`, where it has one.
    - `conv`: a gated convolution of `taps` tokens for each of `heads` channels; its state are the last inputs.
    - `none`: the layer is an FFN alone.

    Of `mla`, `latent_scale` multiplies the latent behind its norm, which has an epsilon of its own. Where its queries
    are `log_scaled`, those of each head are multiplied by s ln(1 + p) + b at position p, of learned s and b. With a
    `source`, the number of an earlier layer, it keeps no latents and attends those of that layer.

    `window` counts the token itself, None is all of the context; `chunk` attends inside of an aligned chunk instead.
    `sinks` are learned logits, one a head, that take weight and give no value. `rope` None is a
    layer without rotary embedding.

    `qk_norm`: queries and keys are normalised, `head` by head or over the `width` of all heads; `late` after the rotary
    embedding; `unit` without weights. `clip` bounds what the projections of q, k and v give. `scale` of the softmax is
    one over the root of `head_dim` where it is None, `out_scale` multiplies the output; with `normed` an RMS norm
    follows it. With `value_norm` values are normalised head by head, without weights; with `value_of_key` they are what
    the projection of keys makes. `temperature` (f, s, a)
    multiplies the query at position p by 1 + s ln(1 + floor((p + a) / f))."""

    kind: Literal["gqa", "mla", "mfa", "linear", "conv", "none"]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "width", "late", "unit"] = ""
    clip: float | None = None
    scale: float | None = None
    out_scale: float = 1.0
    temperature: tuple[float, float, int] | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    gate: GateSpec | None = None
    normed: bool = False
    value_norm: bool = False
    value_of_key: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    latent_scale: float = 1.0
    latent_eps: float = 1e-6
    log_scaled: bool = False
    source: int | None = None
    indexer: IndexerSpec | None = None
    taps: int = 0
    rule: Literal["head", "channel", "sum"] = "head"
    direct: bool = False
    floor: float | None = None

    @property
    def gate_width(self) -> int:
        """Numbers of the output's gate."""
        if self.gate is None:
            return 0
        return self.heads if self.gate.by == "heads" else self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Cached numbers per token and layer. Values that are narrower than keys are kept as wide as these."""
        if self.recurrent:
            return 0
        index = self.indexer.kept if self.indexer else 0
        if self.kind == "mla":
            return index if self.source is not None else self.kv_lora_rank + self.rope_dim + index
        return self.kv_heads * (self.head_dim + max(self.head_dim, self.value_dim)) + index

    def kv_bytes(self, element: int) -> int:
        """Per token and layer, of numbers of so many bytes. Those of one byte have two scales in float32 for each head
        of keys and values, for a latent and its rotary key, or for an index key."""
        rows = self.kv_heads * (self.source is None) + (self.indexer is not None and self.indexer.kept > 0)
        return element * self.kv_width + (8 * rows if element == 1 and self.kv_width else 0)

    @property
    def keeps_for_itself(self) -> bool:
        """Whether a layer alone could compute it: it keeps keys, and reuses nothing of a layer before."""
        return self.kv_width > 0 and self.source is None and not (self.indexer and self.indexer.reuses)

    @property
    def recurrent(self) -> bool:
        """Whether it keeps a state of fixed size in the place of keys and values."""
        return self.kind in ("linear", "conv")

    @property
    def state_numbers(self) -> int:
        """Numbers of a sequence's state, whatever its length; they are kept in float32."""
        if not self.recurrent:
            return 0
        if self.kind == "conv":
            return (self.taps - 1) * self.heads
        channels = 2 * self.kv_heads * self.head_dim + self.heads * self.value_dim
        return self.heads * self.head_dim * self.value_dim + max(self.taps - 1, 0) * channels


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense FFN: gate and up projections to `inner`, `activation` of the gate, down projection; all have a `bias` or
    none has. With `normed` an RMS norm follows. `relu2` has no gate: relu(up)^2. An `inner` of 0 is none at all.
    `alpha` and `limit` are those of "clamped_swiglu" (`MoeSpec`)."""

    inner: int
    activation: str = "silu"
    bias: bool = False
    normed: bool = False
    alpha: float = 1.0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts of one layer, and a shared one of `shared_inner` (0: none).

    `scoring` and `selection` are names of kernels/routing.py's enums, `jitter` is the sparse mixer's. `router_bias` is
    added to the router's logits, `correction_bias` only to what experts are chosen by; `expert_bias`: the experts'
    projections have biases. `weigh_input`: an expert's weight multiplies its input, not its output. `shared_gate`: a
    sigmoid of one number weighs the shared expert; `shared_bias` is that of its projections. With `normed` an RMS
    norm follows the sum of all of them. `shared_scale` multiplies what the shared expert adds.
    Where they are `apart` (Gemma 4), shared and routed experts have norms of their own before and behind, the router
    reads by another one, and weights are multiplied by a number for each expert.

    `activation` "clamped_swiglu" is gate * sigmoid(alpha * gate) * (up + 1) with the gate at most `limit` and up within
    it on both sides (gpt-oss), also of the shared expert (MiniMax M3); "bounded_swiglu" is silu(gate) * up within the
    same limits, and `shared_limit` is such a limit of the shared expert (Step 3.7).

    Routers score `zero_experts` more than there are `experts`: what these give is the row itself (LongCat-Flash,
    arXiv 2509.01322). With `late` the sum of the routed experts is added behind the next layer, which has none of its
    own; what a shared expert gives is added at once (shortcut-connected MoE, arXiv 2404.05019).
    """

    experts: int
    top_k: int
    inner: int
    shared_inner: int
    scoring: str
    selection: str = "plain"
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    closed_to_zero: bool = False
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    weigh_input: bool = False
    shared_gate: bool = False
    shared_bias: bool = False
    shared_scale: float = 1.0
    apart: bool = False
    normed: bool = False
    jitter: float = 0.0
    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shared_limit: float | None = None
    latent: int = 0
    zero_experts: int = 0
    late: bool = False

    @property
    def choices(self) -> int:
        """What a router chooses among."""
        return self.experts + self.zero_experts

    @property
    def expected_sent(self) -> float:
        """Choices of a row that are sent to experts, on the mean where all are chosen alike."""
        return self.top_k * self.experts / self.choices if self.zero_experts else self.top_k

    def width(self, hidden: int) -> int:
        """Numbers of the rows that routed experts eat, of a model of that hidden size."""
        return self.latent or hidden


@dataclass(frozen=True, slots=True)
class Around:
    """What is the same in all layers, and what is before and after them.

    Norms subtract the mean first where they are `centred` (LayerNorm), and add a bias with `norm_bias`. Checkpoints
    hold a norm's weights less one with `norm_less_one`, but for the one inside of a gated delta net. Rows of the
    embedding are multiplied by `embedding_scale`, logits by `logit_scale`; `head_bias` is added to logits first. FFNs
    of a `parallel` model read the norm that attention reads, and both are added to the same row. Where rows are
    `scaled_by_layer`, each layer's last step multiplies them by a learned number. Logits are bounded by `logit_cap` as
    cap tanh(logit / cap)."""

    centred: bool = False
    norm_bias: bool = False
    norm_less_one: bool = False
    head_bias: bool = False
    parallel: bool = False
    scaled_by_layer: bool = False
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


PLAIN_AROUND = Around()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: its attention, and an FFN that is dense or routed."""

    attention: AttentionSpec
    ffn: DenseSpec | MoeSpec

    @property
    def moe(self) -> MoeSpec | None:
        return self.ffn if isinstance(self.ffn, MoeSpec) else None


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Rows that hashes of a token and those before it pick, beside the embedding (arXiv 2601.21204).

    N-grams of 2 up to `order` tokens have `splits` heads each, and every head a table of its own: that of head i has
    `base` + 2 i + 1 rows of `width` numbers. The tables count as one, in the order of the heads. An n-gram begins
    behind the last of the tokens `ends`; `vocab` is what the hash counts tokens by.
    """

    vocab: int
    base: int
    width: int
    order: int
    splits: int
    ends: tuple[int, ...]

    @property
    def heads(self) -> int:
        return self.splits * (self.order - 1)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each head's table, and behind them the number of all rows."""
        return tuple(head * (self.base + head) for head in range(self.heads + 1))

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def slice_rows(self, slices: int) -> int:
        """Rows of each but the last of so many slices."""
        return -(-self.rows // slices)


NO_ATTENTION = AttentionSpec("none", 0, 0, 0, 0)
NO_FFN = DenseSpec(0)
