"""Types of the native library. Addresses are integers from Tensor.data_ptr(); only native.py calls these."""

from collections.abc import Sequence
from typing import overload

class Engine:
    def __init__(self, threads: int, isa: str = "") -> None: ...
    def borrow(self, bell: int, memory: object) -> None: ...
    @property
    def borrowed(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def compacts(self) -> bool: ...
    @property
    def threads(self) -> int: ...

class Groups:
    def __init__(self, inputs: int, wide: bool, e2m1: bool) -> None: ...

class Linear:
    @overload
    def __init__(self, outputs: int, inputs: int, dtype: int) -> None: ...
    @overload
    def __init__(self, outputs: int, inputs: int, groups: Groups) -> None: ...
    @overload
    def __init__(self, outputs: int, inputs: int, types: Sequence[int]) -> None: ...
    def pack(self, weight: int, dtype: int, stride: int) -> None: ...
    def pack_int4(self, codes: int, scales: int) -> None: ...
    def pack_ggml(self, rows: int, first: int, count: int) -> None: ...
    def set_bias(self, bias: int, dtype: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    def run(
        self, engine: Engine, x: int, stride: int, rows: int, dtype: int, out: int, out_dtype: int
    ) -> None: ...

def mlp(
    engine: Engine, gate_up: Linear, down: Linear, dtype: int, x: int, stride: int, rows: int, out: int
) -> None: ...

class HeadLinear:
    @overload
    def __init__(self, heads: int, outputs: int, inputs: int, dtype: int) -> None: ...
    @overload
    def __init__(self, heads: int, outputs: int, inputs: int, groups: Groups) -> None: ...
    def pack(self, head: int, weight: int, dtype: int, stride: int) -> None: ...
    def pack_int4(self, head: int, codes: int, scales: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    def run(
        self, engine: Engine, dtype: int, x: int, token_stride: int, head_stride: int, tokens: int, out: int
    ) -> None: ...

class Gating:
    def __init__(self, limit: float, alpha: float, bounded: bool, squared: bool, gelu: bool) -> None: ...

class Experts:
    @overload
    def __init__(
        self,
        slots: int,
        hidden: int,
        inner: int,
        dtype: int,
        bias: bool,
        gating: Gating | None,
        places: int = -1,
    ) -> None: ...
    @overload
    def __init__(
        self,
        slots: int,
        hidden: int,
        inner: int,
        groups: Groups,
        bias: bool,
        gating: Gating | None,
        places: int = -1,
    ) -> None: ...
    @overload
    def __init__(
        self,
        slots: int,
        hidden: int,
        inner: int,
        types: tuple[int, int],
        bias: bool,
        gating: Gating | None,
        places: int = -1,
    ) -> None: ...
    def put(self, slot: int, place: int) -> None: ...
    def pack_ggml(self, slot: int, gate_up: int, down: int) -> None: ...
    def pack_fp8(self, slot: int, gate_up: int, gate_up_scale: int, down: int, down_scale: int) -> None: ...
    def set_bias(self, slot: int, gate_up: int, down: int) -> None: ...
    def pack_int4(self, slot: int, gate_up: int, gate_up_scale: int, down: int, down_scale: int) -> None: ...
    def pack(
        self,
        slot: int,
        gate_up: int,
        gate_up_stride: int,
        down: int,
        down_stride: int,
        dtype: int,
        up: int = 0,
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    def run(
        self,
        engine: Engine,
        x: int,
        stride: int,
        dtype: int,
        slot: int,
        weight: int,
        rows: int,
        choices: int,
        out: int,
        out_stride: int,
        out_dtype: int,
        add: bool,
    ) -> None: ...

class Batch:
    def __init__(
        self,
        query_start: int,
        context: int,
        table: int,
        table_stride: int,
        sequences: int,
        position: int,
        slot: int,
        tokens: int,
    ) -> None: ...

class Rule:
    def __init__(
        self,
        top_k: int,
        scoring: int,
        selection: int,
        groups: int,
        top_groups: int,
        renormalise: bool,
        epsilon: float,
        scale: float,
        closed_value: float,
    ) -> None: ...

class LayerShape:
    def __init__(
        self,
        hidden: int,
        heads: int,
        groups: int,
        size: int,
        eps: float,
        scale: float,
        window: int,
        wide: bool,
        late: bool,
    ) -> None: ...

class CachePair:
    value_size: int
    def __init__(
        self,
        keys: int,
        key_place: Sequence[int],
        key_size: int,
        values: int,
        value_place: Sequence[int],
        value_size: int,
        groups: int,
        blocks: int,
        block_size: int,
        bits: int,
    ) -> None: ...

class HalfSteps:
    def __init__(
        self,
        opening: Linear | None,
        softplus: bool,
        parallel: bool,
        centred: bool,
        clip: float,
        norms: Sequence[int],
        floats: Sequence[int],
        experts: int,
    ) -> None: ...

class LayerWeights:
    def __init__(
        self,
        input_norm: int,
        q_norm: int,
        k_norm: int,
        post_norm: int,
        qkv: Linear,
        out: Linear,
        gate: Linear | None,
        bias: int,
        sinks: int,
        rule: Rule,
        steps: HalfSteps | None,
    ) -> None: ...

class AttentionHalf:
    def run(
        self,
        engine: Engine,
        batch: Batch,
        x: int,
        normed: int,
        expert: int,
        weight: int,
        slot: int,
        most: int,
    ) -> None: ...

class ExpertLayers:
    def __init__(self, engine: Engine, layers: Sequence[Experts], rows: int, sums: int) -> None: ...

class FfnSteps:
    def __init__(
        self,
        opening: Linear | None,
        gating: Gating | None,
        scale: float,
        row_scale: float,
        eps: float,
        norms: Sequence[int],
    ) -> None: ...

class MixerArrays:
    def __init__(
        self, conv: int, bias: int, skip: int, rate: int, step: int, behind: int, norm: int
    ) -> None: ...

class MixerWeights:
    def __init__(
        self,
        kind: int,
        sizes: tuple[int, int, int, int, int],
        down: Linear | None,
        forget: Linear | None,
        open: Linear | None,
        out: Linear | None,
        arrays: MixerArrays,
        floor: float,
        norm_groups: int,
    ) -> None: ...

class StateHalf:
    def __init__(
        self,
        dtype: int,
        hidden: int,
        eps: float,
        input_norm: int,
        post_norm: int,
        mixer: MixerWeights,
        gate: Linear | None,
        bias: int,
        rule: Rule,
    ) -> None: ...
    def over(self, data: int, stride: int, blocks: int, block_size: int) -> AttentionHalf: ...
    def begin(
        self, engine: Engine, x: int, tokens: int, mixed: int, decay: int, beta: int, gate: int
    ) -> None: ...
    def end(
        self,
        engine: Engine,
        x: int,
        tokens: int,
        read: int,
        gate: int,
        normed: int,
        expert: int,
        weight: int,
    ) -> None: ...

def convolve(
    engine: Engine,
    channels: int,
    taps: int,
    conv: int,
    x: int,
    out: int,
    state: int,
    stride: int,
    blocks: int,
    block_size: int,
    batch: Batch,
) -> None: ...

class StackLayer:
    def __init__(
        self,
        attention: AttentionHalf,
        gate_up: Linear | None,
        down: Linear | None,
        experts: Experts | None,
        away: bool,
        group: int,
        steps: FfnSteps | None,
    ) -> None: ...

class Stack:
    def __init__(self, layers: Sequence[StackLayer]) -> None: ...
    def run(
        self,
        engine: Engine,
        groups: Sequence[Batch],
        x: int,
        expert: int,
        bad: int,
        exchange: object | None,
        normed: int,
        weight: int,
        slot: int,
        most: int,
    ) -> tuple[int, float, float]: ...

class Embedding:
    def __init__(self, data: int, rows: int, size: int, type: int) -> None: ...
    def read(self, engine: Engine, dtype: int, token: int, count: int, out: int) -> None: ...

class Predictor:
    def __init__(
        self,
        layer: Stack,
        embed: Embedding,
        embedding_norm: int,
        hidden_norm: int,
        last_norm: int,
        eps: float,
        logit_scale: float,
        join: Linear,
        head: Linear,
    ) -> None: ...
    def draft(
        self,
        engine: Engine,
        batch: Batch,
        token: int,
        hidden: int,
        ends: int,
        deepest: int,
        least: float,
        block_size: int,
        drafted: int,
        likely: int,
        expert: int,
    ) -> int: ...

class Decoder:
    def __init__(
        self,
        layers: Stack,
        embed: Embedding,
        last_norm: int,
        last_bias: int,
        centred: bool,
        eps: float,
        scales: tuple[float, float, float],
        top: int,
        head: Linear,
    ) -> None: ...
    def decode(
        self,
        engine: Engine,
        groups: Sequence[Batch],
        block_sizes: Sequence[int],
        token: int,
        passes: int,
        stops: Sequence[Sequence[int]],
        drawn: int,
        expert: int,
    ) -> tuple[int, float, bool]: ...

class MlaShape:
    def __init__(
        self,
        hidden: int,
        heads: int,
        nope: int,
        rope: int,
        value: int,
        rank: int,
        eps: float,
        latent_eps: float,
        scale: float,
        top: int,
        interleaved: bool,
        reuses: bool,
    ) -> None: ...

class MlaNorms:
    def __init__(self, input: int, q: int, latent: int, post: int) -> None: ...

class IndexerWeights:
    def __init__(self, queries: Linear, keys: Linear, weights: Linear, norm: int, bias: int) -> None: ...

class MlaWeights:
    def __init__(
        self,
        norms: MlaNorms,
        down: Linear,
        q_up: Linear | None,
        up_k: HeadLinear,
        up_v: HeadLinear,
        out: Linear,
        gate: Linear | None,
        bias: int,
        rule: Rule,
        index: IndexerWeights | None,
        steps: HalfSteps | None,
    ) -> None: ...

class MlaLayer:
    def __init__(
        self,
        dtype: int,
        shape: MlaShape,
        weights: MlaWeights,
        cos: int,
        sin: int,
        positions: int,
        interleaved: bool,
    ) -> None: ...
    def over(
        self, cache: CachePair, index: CachePair | None, near: NearRows | None = None
    ) -> AttentionHalf: ...

class GqaLayer:
    def __init__(
        self, dtype: int, shape: LayerShape, weights: LayerWeights, cos: int, sin: int, positions: int
    ) -> None: ...
    def over(self, cache: CachePair) -> AttentionHalf: ...

def prefer_huge_pages(data: int, bytes: int) -> None: ...
def stream(engine: Engine, data: int, bytes: int) -> int: ...
def rms_norm(
    engine: Engine, dtype: int, x: int, stride: int, rows: int, size: int, weight: int, eps: float, out: int
) -> None: ...
def delta(
    engine: Engine,
    sizes: tuple[int, int, int, int, int],
    rule: int,
    conv: int,
    bias: int,
    skip: int,
    mixed: int,
    decay: int,
    beta: int,
    out: int,
    state: int,
    stride: int,
    blocks: int,
    block_size: int,
    batch: Batch,
) -> None: ...
def add_sums(
    engine: Engine, dtype: int, x: int, y_dtype: int, y: int, rows: int, size: int, bad: int, layer: int
) -> None: ...
def add_rms_norm(
    engine: Engine, dtype: int, x: int, y: int, rows: int, size: int, weight: int, eps: float, out: int
) -> None: ...
def open_rows(
    engine: Engine,
    dtype: int,
    x: int,
    rows: int,
    heads: int,
    size: int,
    gate: int,
    wide: bool,
    softplus: bool,
) -> None: ...
def join_rows(
    engine: Engine, dtype: int, gating: Gating, both: int, rows: int, inner: int, out: int
) -> None: ...
def centre_rows(
    engine: Engine,
    dtype: int,
    x: int,
    rows: int,
    size: int,
    weight: int,
    bias: int,
    eps: float,
    out: int,
) -> None: ...
def cap_rows(engine: Engine, x: int, rows: int, size: int, cap: float) -> None: ...
def gated(engine: Engine, dtype: int, wide: int, rows: int, size: int, out: int) -> None: ...
def rope(
    engine: Engine,
    dtype: int,
    x: int,
    token_stride: int,
    head_stride: int,
    tokens: int,
    heads: int,
    cos: int,
    sin: int,
    position: int,
    positions: int,
    half: int,
    interleaved: bool,
    out: int,
) -> None: ...
def write_cache(
    dtype: int,
    x: int,
    token_stride: int,
    group_stride: int,
    tokens: int,
    slot: int,
    cache: int,
    place: Sequence[int],
    groups: int,
    size: int,
    blocks: int,
    block_size: int,
) -> None: ...
def write_pairs(dtype: int, k: int, v: int, tokens: int, slot: int, cache: CachePair) -> None: ...
def write_latents(dtype: int, x: int, tokens: int, slot: int, cache: CachePair) -> None: ...
def attend(
    engine: Engine,
    dtype: int,
    q: int,
    q_token: int,
    q_head: int,
    heads: int,
    cache: CachePair,
    scale: float,
    window: int,
    sinks: int,
    out: int,
    batch: Batch,
) -> None: ...

class NearRows:
    def __init__(self, addresses: Sequence[int], sizes: tuple[int, int, int]) -> None: ...
    def fetch(self, engine: Engine, slot: int, count: int, most: int, tokens: int, place: int) -> None: ...

def choose_rows(
    engine: Engine,
    dtype: int,
    addresses: tuple[int, int, int, int],
    strides: tuple[int, int],
    place: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int, int, int],
    most: int,
    batch: Batch,
) -> None: ...
def argmax(engine: Engine, row: int, rows: int, size: int, index: int) -> None: ...
def route(
    engine: Engine,
    dtype: int,
    x: int,
    stride: int,
    tokens: int,
    gate: int,
    gate_dtype: int,
    experts: int,
    hidden: int,
    bias: int,
    rule: Rule,
    expert: int,
    weight: int,
) -> None: ...
def xxh3(data: bytes | bytearray | memoryview, seed: int) -> int: ...
def read_blocks(
    file: int,
    offset: int,
    pitch: int,
    window: memoryview,
    parts: Sequence[tuple[int, int]],
    expected: Sequence[tuple[int, int, int]],
) -> tuple[int, list[bool]]: ...
def put_blocks(
    addresses: Sequence[int],
    parts: Sequence[tuple[int, int]],
    expected: Sequence[tuple[int, int, int]],
) -> list[bool]: ...
def take_blocks(
    parts: Sequence[tuple[int, int]],
    blocks: Sequence[int],
    addresses: Sequence[int],
    seeds: Sequence[int],
) -> list[int]: ...
