"""The tokenizer of a GGUF file as the `tokenizers` library has it: merges of byte pairs, or SentencePiece's.

`tokenizer.ggml.model` is `gpt2` for the first, `llama` for the second. A SentencePiece vocabulary has scores instead of
merges: two pieces become one where that one is a token, the best score first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from afserve.errors import CheckpointError, shown
from afserve.gguf.metadata import Metadata
from afserve.gguf.splitting import SPLITTINGS

_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # of `tokenizer.ggml.token_type`
_SPACE = "▁"
_MOST_PIECE = 256  # characters of a token whose halves are looked for
_ENDS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "</s>",
    )
)  # control tokens that llama.cpp takes for the end of an answer, whatever a file says
_ENDING_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`special` are bos_token and its like as texts; `ends` the ids that end an answer."""

    tokenizer: Tokenizer
    special: Mapping[str, str]
    ends: tuple[int, ...]


def vocabulary_of(metadata: Metadata, size: int) -> Vocabulary:
    """Of a model whose embedding has `size` rows. Raises CheckpointError."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= size:
        metadata.refuse(
            "tokenizer.ggml.tokens", f"has {len(tokens):,} tokens, the embedding has {size:,} rows"
        )
    kinds = metadata.numbers("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        metadata.refuse("tokenizer.ggml.token_type", f"has {len(kinds):,} items for {len(tokens):,} tokens")
    model = metadata.string("tokenizer.ggml.model")
    if model == "gpt2":
        made, begins = _byte_pairs(metadata, tokens, kinds)
    elif model == "llama":
        made, begins = _sentence_pieces(metadata, tokens, kinds)
    else:
        metadata.refuse("tokenizer.ggml.model", "is not supported; supported: gpt2, llama")
    for kind, is_special in ((_CONTROL, True), (_USER, False)):
        texts = [token for token, each in zip(tokens, kinds, strict=True) if each == kind and token]
        made.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in texts])
    special = {
        name: text for name in ("bos", "eos", "unk", "pad") if (text := _named(metadata, name, tokens))
    }
    around = _around(metadata, tokens, begins)
    if around is not None:
        made.post_processor = around
    return Vocabulary(
        made, {f"{name}_token": text for name, text in special.items()}, _ends(metadata, tokens, kinds)
    )


def _byte_pairs(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[float]) -> tuple[Tokenizer, bool]:
    """And whether texts begin with the bos token where no key says."""
    name = metadata.string("tokenizer.ggml.pre", "default")
    rule = SPLITTINGS.get(name)
    if rule is None:
        metadata.refuse("tokenizer.ggml.pre", f"is not supported; supported: {', '.join(sorted(SPLITTINGS))}")
    ids = {token: at for at, token in enumerate(tokens) if kinds[at] != _UNUSED}
    merges = [_pair(metadata, merge, ids) for merge in metadata.texts("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(ids, merges, fuse_unk=False, byte_fallback=False, ignore_merges=rule.whole))
    made.pre_tokenizer, made.decoder = rule.pre_tokenizer(), decoders.ByteLevel()
    normalizer = rule.normalizer()
    if normalizer is not None:
        made.normalizer = normalizer
    return made, rule.begins


def _pair(metadata: Metadata, merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in ids or right not in ids or left + right not in ids:
        raise CheckpointError(
            f"{metadata.where}: tokenizer.ggml.merges: {shown(merge)} is not of two tokens that make a third"
        )
    return left, right


def _sentence_pieces(
    metadata: Metadata, tokens: Sequence[str], kinds: Sequence[float]
) -> tuple[Tokenizer, bool]:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        metadata.refuse("tokenizer.ggml.scores", f"has {len(scores):,} items for {len(tokens):,} tokens")
    ids = {token: at for at, token in enumerate(tokens) if kinds[at] != _UNUSED}
    unknown = next((token for token, at in ids.items() if kinds[at] == _UNKNOWN), None)
    merged = {token: at for token, at in ids.items() if kinds[at] not in (_CONTROL, _UNKNOWN, _BYTE)}
    made = Tokenizer(
        models.BPE(ids, _merges(merged, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaced = metadata.is_set("tokenizer.ggml.add_space_prefix", True)
    replaced = normalizers.Replace(" ", _SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if spaced else replaced
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if spaced else parts)
    return made, True


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    found = [
        (-scores[at], at, cut, token)
        for token, at in ids.items()
        if len(token) <= _MOST_PIECE
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(token[:cut], token[cut:]) for _, _, cut, token in sorted(found)]


def _named(metadata: Metadata, name: str, tokens: Sequence[str]) -> str:
    """A special token's text; empty where the file names none."""
    at = _token_id(
        metadata, f"{'unknown' if name == 'unk' else 'padding' if name == 'pad' else name}_token_id", tokens
    )
    return "" if at is None else tokens[at]


def _token_id(metadata: Metadata, name: str, tokens: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{name}"
    if not metadata.has(key):
        return None
    found = metadata.integer(key)
    if not 0 <= found < len(tokens):
        metadata.refuse(key, f"is no id of {len(tokens):,} tokens")
    return found


def _around(metadata: Metadata, tokens: Sequence[str], begins: bool) -> processors.PostProcessor | None:
    """What puts the bos token before a text, and the eos token behind, where the file asks for them."""
    asked = {"bos": begins, "eos": False}
    ids = {name: _token_id(metadata, f"{name}_token_id", tokens) for name in asked}
    put = {
        name: at
        for name, default in asked.items()
        if (at := ids[name]) is not None and metadata.is_set(f"tokenizer.ggml.add_{name}_token", default)
    }
    if not put:
        return None
    first, last = ([tokens[put[name]]] if name in put else [] for name in asked)
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=[(tokens[at], at) for at in put.values()],
    )


def _ends(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[float]) -> tuple[int, ...]:
    named = (_token_id(metadata, name, tokens) for name in _ENDING_KEYS)
    control = (at for at, token in enumerate(tokens) if kinds[at] == _CONTROL and token in _ENDS)
    return tuple(dict.fromkeys((*(at for at in named if at is not None), *control)))
