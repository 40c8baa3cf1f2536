"""What of a model each of several devices of an attention node has: parts of heads and FFNs, as shapes of their own.

Layers with heads are split by these, FFNs and shared experts by their inner size, the LM head by the vocabulary; the
first device leads, and has all that is not split: embedding, routers, layers that keep states or attend another layer's
latents, the LM head where a draft head shares it. Sizes of a share follow from its shape as those of a whole model do.
It knows no machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from afserve.errors import ConfigError
from afserve.spec import ModelSpec
from afserve.spec_parts import NO_ATTENTION, NO_FFN, AttentionSpec, DenseSpec, LayerSpec, MoeSpec

FLAG = "--tensor-parallel"


def is_split(a: AttentionSpec) -> bool:
    """Whether this layer's heads are dealt to the devices of a node."""
    return a.kind in ("gqa", "mla") and a.source is None


def ffn_is_split(inner: int, devices: int) -> bool:
    """Whether an FFN, or a shared expert, of this inner size is; else it is whole on the device that leads."""
    return inner > 0 and inner % devices == 0


@dataclass(frozen=True, slots=True)
class DeviceShares:
    """`leading` is the shape of what the first device has, `further` of what each of `more` others has beside it.
    `head`: numbers of each one's part of the LM head; 0: it is whole on the first."""

    leading: ModelSpec
    further: ModelSpec
    more: int
    head: int

    @property
    def leading_parameters(self) -> int:
        """Of the first. A head that is tied to the embedding is copied where it is split."""
        spec = self.leading
        whole = 0 if spec.tied or not self.head else spec.vocab_size * spec.hidden
        return spec.attention_parameters() + self.head - whole

    @property
    def further_parameters(self) -> int:
        """Of one of the others, without an embedding and the last norm."""
        spec = self.further
        ends = spec.vocab_size * spec.hidden * (1 if spec.tied else 2) + spec.hidden
        return spec.attention_parameters() - ends + self.head

    def in_memory(self, *, together: bool) -> tuple[ModelSpec, ...]:
        """The shapes of what lies in one memory: all devices' where they share it `together`, else the first one's,
        which has the most."""
        return (self.leading, *([self.further] * self.more)) if together else (self.leading,)


def shares_of(spec: ModelSpec, devices: int, *, split_head: bool = True) -> DeviceShares:
    """Raises ConfigError that names what of this model cannot be split over so many."""
    check_split(spec, devices)
    leading = _each(spec, lambda layer: _leading(layer, devices))
    further = _each(spec, lambda layer: _further(layer, devices))
    head = -(-spec.vocab_size // devices) * spec.hidden if split_head else 0
    further = replace(further, predictors=0, table=None, encoder=None)
    return DeviceShares(leading, further, devices - 1, head)


def check_split(spec: ModelSpec, devices: int) -> None:
    """Raises ConfigError; one device has everything."""
    if devices == 1:
        return
    if spec.quantization is not None and spec.quantization.gguf:
        raise _refusal(devices, "weights of a GGUF file stay in its blocks, which are not cut; leave it out")
    split = [number for number in range(len(spec.pattern)) if is_split(spec.layer(number).attention)]
    if not split:
        raise _refusal(devices, "no layer of this model has heads of attention that are split; leave it out")
    for number in split:
        _check_heads(spec.layer(number).attention, number, devices)


def _check_heads(a: AttentionSpec, layer: int, devices: int) -> None:
    heads = f"layer {layer} has {a.heads} heads (num_attention_heads)"
    gqa = a.kind != "mla"
    if gqa:
        heads += f" over {a.kv_heads} of keys and values (num_key_value_heads)"
    if a.heads % devices or (gqa and a.kv_heads % devices and devices % a.kv_heads):
        fine = [n for n in (2, 4, 8) if not a.heads % n and not (gqa and a.kv_heads % n and n % a.kv_heads)]
        instead = f"use {' or '.join(map(str, fine))}" if fine else "leave it out"
        raise _refusal(devices, f"{heads}, which are no {devices} equal shares; {instead}")
    if a.qk_norm == "width":
        raise _refusal(
            devices,
            f"layer {layer} normalises the queries of all heads together (q_norm over num_attention_heads x head_dim); "
            "leave it out",
        )


def _refusal(devices: int, why: str) -> ConfigError:
    return ConfigError(f"{FLAG} {devices}: {why}", param="tensor_parallel")


def _each(spec: ModelSpec, cut: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    return replace(spec, kinds=tuple(map(cut, spec.kinds)))


def _leading(layer: LayerSpec, devices: int) -> LayerSpec:
    attention = _part_of(layer.attention, devices) if is_split(layer.attention) else layer.attention
    ffn = layer.ffn
    if isinstance(ffn, MoeSpec):
        if ffn_is_split(ffn.shared_inner, devices):
            ffn = replace(ffn, shared_inner=ffn.shared_inner // devices)
    elif ffn_is_split(ffn.inner, devices):
        ffn = replace(ffn, inner=ffn.inner // devices)
    return LayerSpec(attention, ffn)


def _further(layer: LayerSpec, devices: int) -> LayerSpec:
    attention = _part_of(layer.attention, devices) if is_split(layer.attention) else NO_ATTENTION
    inner = layer.ffn.shared_inner if isinstance(layer.ffn, MoeSpec) else layer.ffn.inner
    split = ffn_is_split(inner, devices)
    return LayerSpec(attention, DenseSpec(inner // devices, layer.ffn.activation) if split else NO_FFN)


def _part_of(a: AttentionSpec, devices: int) -> AttentionSpec:
    """A latent is whole on each device, and so is one of fewer heads of keys and values than there are devices."""
    heads, kv_heads = a.heads // devices, max(a.kv_heads // devices, 1)
    indexer = a.indexer
    if indexer is not None and a.kind == "gqa":  # an index head of each head of keys
        indexer = replace(indexer, heads=max(indexer.heads // devices, 1))
    return replace(a, heads=heads, kv_heads=kv_heads, indexer=indexer)
