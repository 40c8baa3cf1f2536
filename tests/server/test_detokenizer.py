"""Any tokens, grouped in any way, give the text that decoding them at once gives; stop strings cut the same place."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, normalizers

from afserve.engine.scheduling.request import SamplingParams, TokenEvent
from afserve.server.replies.choice import ChoiceDecoder
from afserve.tokens.detokenizer import StopStrings, detokenizer
from afserve.tokens.tokenizer import Tokenizer

ids = st.lists(st.integers(0, 339), max_size=40)
PARTS = ["the", " fox", "x", "日", "本語", "😀", " a", "\ufffd", "é", "</s>"]


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = detokenizer(tokenizer)
    return [*(decoder.push(i) for i in token_ids), decoder.flush()]


@settings(max_examples=300, deadline=None)
@given(token_ids=ids)
def test_byte_level_equals_decoding_at_once(tokenizer, token_ids):
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_valid_text_never_shows_a_broken_character(tokenizer, text):
    pieces = stream(tokenizer, tokenizer.encode(text))
    known = [token for token in ("<s>", "<|end|>", "<|user|>", "<|assistant|>") if token in text]
    if not known:
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama's and Mixtral's kind: word marks, byte fallback, one leading space stripped."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁the",
        "▁fox",
        "x",
        "日",
        "a",
        "▁a",
    ]
    vocabulary = Vocabulary(
        models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    vocabulary.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    vocabulary.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(vocabulary)


@settings(max_examples=300, deadline=None)
@example(
    parts=["the", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "本語"]
)  # 21 bytes that are characters
@given(
    parts=st.lists(
        st.sampled_from(["the", " fox", "x", "日", "本語", "😀", " a", "\ufffd", "é", "</s>"]), max_size=15
    )
)
def test_sentencepiece_equals_decoding_at_once(sentencepiece, parts):
    token_ids = sentencepiece.encode("".join(parts))
    pieces = stream(sentencepiece, token_ids)
    assert "".join(pieces) == sentencepiece.decode(token_ids)
    if "\ufffd" not in "".join(parts):
        assert all("\ufffd" not in piece for piece in pieces)


def test_sentencepiece_token_bytes(sentencepiece):
    spell = sentencepiece.token_bytes
    assert spell(3 + 0xE6) == b"\xe6"
    assert spell(sentencepiece.token_id("▁the")) == b" the" and spell(sentencepiece.token_id("x")) == b"x"
    assert spell(2) == b"</s>"


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


alphabet = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def passed(pieces: list[str], stop: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stop, include=include)
    out = "".join(matcher.push(piece) for piece in pieces)
    return out + matcher.flush(), matcher.matched


@settings(max_examples=500, deadline=None)
@given(text=alphabet, stop=stops, sizes=st.lists(st.integers(0, 5), max_size=12), include=st.booleans())
def test_stop_strings_do_not_depend_on_the_cut(text, stop, sizes, include):
    out, matched = passed(cut(text, sizes), stop, include)
    assert (out, matched) == passed(list(text), stop, include) == passed([text], stop, include)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert (out, matched) == (text, None)
    else:
        assert matched is not None and text.startswith(out if include else out + matched)
        assert len(out) == min(ends) - (0 if include else len(matched))


@settings(max_examples=200, deadline=None)
@given(text=alphabet, stop=stops.filter(bool))
def test_only_what_may_still_stop_is_held(text, stop):
    matcher = StopStrings(stop)
    out = ""
    for i, c in enumerate(text):
        out += matcher.push(c)
        if matcher.matched is not None:
            assert matcher.push("more") == ""
            return
        held = text[len(out) : i + 1]
        assert not held or any(s.startswith(held) and s != held for s in stop)


@settings(max_examples=200, deadline=None)
@given(
    token_ids=st.lists(st.integers(2, 339), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    stop=st.lists(st.sampled_from(["a", "th", "e q", "日", " "]), max_size=2),
    min_tokens=st.integers(0, 6),
)
def test_choice_is_the_same_however_events_are_grouped(tokenizer, token_ids, sizes, stop, min_tokens):
    params = SamplingParams(max_tokens=64, stop=tuple(stop), min_tokens=min_tokens)
    one_by_one = [[i] for i in token_ids]
    grouped, rest = [], list(token_ids)
    for size in sizes:
        grouped.append(rest[:size])
        rest = rest[size:]
    groups = [group for group in (*grouped, rest) if group]
    assert run_choice(tokenizer, params, groups) == run_choice(tokenizer, params, one_by_one)


def run_choice(
    tokenizer: Tokenizer, params: SamplingParams, groups: list[list[int]]
) -> tuple[str, int, str | None]:
    decoder = ChoiceDecoder(tokenizer, params)
    text, tokens, reason = "", 0, None
    for i, group in enumerate(groups):
        last = "length" if i == len(groups) - 1 else None
        piece = decoder.decode_event(TokenEvent(1, tuple(group), finish_reason=last))
        text, tokens, reason = text + piece.text, tokens + piece.tokens, piece.finish_reason
        if reason:
            break
    return text, tokens, reason
