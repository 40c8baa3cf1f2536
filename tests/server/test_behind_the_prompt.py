"""What is generated is the text that it adds to the prompt's, in every vocabulary; so are tokens and offsets."""

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, normalizers, pre_tokenizers

from afserve.control.backend import ServedModel
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenEvent
from afserve.server.http.settings import ServerSettings
from afserve.server.replies.choice import ChoiceDecoder
from afserve.tokens.detokenizer import detokenizer, text_up_to
from afserve.tokens.tokenizer import Tokenizer
from tests.server.conftest import ScriptedBackend, Server

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
WORDS = [
    "▁",
    "▁▁",
    "▁▁▁▁",
    "▁the",
    "▁fox",
    "x",
    "a",
    "▁a",
    "日",
    "é",
    "▁x▁y",
    ".",
    "▁.",
    "H",
    "ello",
    "▁Hello",
    "\n",
]
ADDED = "<|mark|>"
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "mixtral": decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(FALLBACK),
    "two spaces": decoders.Sequence([*FALLBACK, decoders.Strip(" ", 2, 0)]),
    "metaspace always": decoders.Metaspace("▁", "always"),
    "metaspace first": decoders.Metaspace("▁", "first"),
    "metaspace never": decoders.Metaspace("▁", "never"),
    "bytes and metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")]),
    "bytes, fused, metaspace": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace("▁", "first")]
    ),
}


def built(name: str) -> Tokenizer:
    words = [*SPECIAL, *BYTES, *WORDS]
    model = models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    vocabulary = Vocabulary(model)
    if name.startswith("metaspace"):
        vocabulary.pre_tokenizer = pre_tokenizers.Metaspace("▁", name.split()[1])
    else:
        vocabulary.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    vocabulary.decoder = DECODERS[name]
    vocabulary.add_special_tokens(SPECIAL[1:])
    vocabulary.add_tokens([ADDED])
    return Tokenizer(vocabulary)


@pytest.fixture(scope="module", params=DECODERS)
def any_kind(request) -> Tokenizer:
    return built(request.param)


@pytest.fixture(scope="module")
def mixtral() -> Tokenizer:
    return built("mixtral")


def spelled(part: str) -> list[str]:
    """In words of the vocabulary, or in bytes."""
    return [part] if part in (*SPECIAL, *WORDS, ADDED) else [f"<0x{b:02X}>" for b in part.encode()]


PARTS = st.lists(st.sampled_from([*SPECIAL[1:], *WORDS, ADDED, "語", "😀", " ", "b", "ü"]), max_size=12)


def said(decoder, ids: list[int]) -> str:
    return "".join([*(decoder.push(i) for i in ids), decoder.flush()])


def behind(tokenizer: Tokenizer, ids: list[int], cut: int, skip: bool) -> tuple[str, str]:
    """What the prompt certainly shows, and what the rest adds: transformers decodes both together."""
    shown = [i for i in ids[:cut] if not (skip and i in tokenizer.special_ids)]
    while shown and tokenizer.decode(shown, skip_special_tokens=False).endswith("\ufffd"):
        shown.pop()
    certain = tokenizer.decode(shown, skip_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert whole.startswith(certain)
    return certain, whole[len(certain) :]


@settings(max_examples=300, deadline=None)
@given(parts=PARTS, more=PARTS, at=st.integers(0, 3), skip=st.booleans())
@example(parts=["H", "ello"], more=["▁the"], at=0, skip=True)
@example(parts=["<s>"], more=["▁the"], at=0, skip=True)
@example(parts=["<s>"], more=["▁the"], at=0, skip=False)
@example(parts=["▁"], more=["▁the"], at=0, skip=True)
@example(parts=["a", "▁", "▁▁"], more=["▁", "▁the"], at=0, skip=True)
@example(parts=["😀"] * 20, more=["語"], at=2, skip=True)
def test_text_is_what_the_tokens_add(any_kind, parts, more, at, skip):
    names = [name for part in (*parts, *more) for name in spelled(part)]
    ids = [any_kind.token_id(name) for name in names]
    cut = sum(len(spelled(part)) for part in parts)
    cut = min(len(ids), cut + at)  # within a character, perhaps
    if "Fallback" not in json.loads(any_kind._vocabulary.to_str())["decoder"].__repr__():
        ids = [i for i in ids if any_kind.token(i) not in BYTES]
        cut = min(cut, len(ids))
    certain, added = behind(any_kind, ids, cut, skip)
    for echoes in (False, True):
        decoder = detokenizer(any_kind, ids[:cut], skip_special_tokens=skip, echoes=echoes)
        assert said(decoder, ids[cut:]) == added or (cut == len(ids) and not echoes)
    assert skip or text_up_to(any_kind, ids[:cut]) == certain


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 339), max_size=24), cut=st.integers(0, 24), skip=st.booleans())
def test_byte_level_with_and_without_the_prompt(tokenizer, ids, cut, skip):
    prompt, output = ids[:cut], ids[cut:]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    told = said(detokenizer(tokenizer, prompt, skip_special_tokens=skip, echoes=True), output)
    assert whole.endswith(told)
    if not skip:
        assert text_up_to(tokenizer, prompt) + told == whole
    alone = said(detokenizer(tokenizer, prompt, skip_special_tokens=skip), output)
    assert told in (alone, "\ufffd" + alone)


@pytest.mark.parametrize(
    ("prompt", "output", "text", "echoed"),
    [
        (b"\xe6\x97", b"\xa5", "日", "日"),
        (b"\xe6", b"\x97\xa5", "日", "日"),
        (b"\xe6\x97", "x", "x", "\ufffd\ufffdx"),
        (b"\xe6\x97", "▁the", " the", "\ufffd\ufffd the"),
        (b"\xe6\x97", b"", "", "\ufffd\ufffd"),
        (b"\xf0\x9f", b"\x98\x80!", "😀!", "😀!"),
        (b"a\x80", "x", "x", "x"),
    ],
)
def test_a_character_that_the_prompt_began(mixtral, prompt, output, text, echoed):
    ids = [
        [mixtral.token_id(raw)] if isinstance(raw, str) else [mixtral.token_id(f"<0x{b:02X}>") for b in raw]
        for raw in (prompt, output)
    ]
    assert said(detokenizer(mixtral, ids[0]), ids[1]) == text
    assert said(detokenizer(mixtral, ids[0], echoes=True), ids[1]) == echoed


@pytest.mark.parametrize(
    ("stop", "text"), [(" the", ""), ("the", " "), (" fox", " the"), ("o the", " the fox")]
)
def test_a_stop_string_sees_the_space_of_the_first_word(mixtral, stop, text):
    prompt = [mixtral.token_id(name) for name in ("<s>", "▁Hello")]
    output = tuple(mixtral.token_id(name) for name in ("▁the", "▁fox"))
    decoder = ChoiceDecoder(mixtral, SamplingParams(max_tokens=4, stop=(stop,)), prompt)
    piece = decoder.decode_event(TokenEvent(1, output, finish_reason="length"))
    assert piece.text == text and piece.finish_reason == ("length" if stop == "o the" else "stop")


@settings(max_examples=200, deadline=None)
@given(parts=PARTS)
@example(parts=["▁▁▁▁", "x"])
def test_spelled_tokens_join_to_the_text(any_kind, parts):
    ids = [any_kind.token_id(name) for part in parts for name in spelled(part)]
    if "metaspace " in str(any_kind._vocabulary.decoder).lower():
        return
    ids = [
        i for i in ids if any_kind.token(i) not in BYTES or "ByteFallback" in any_kind._vocabulary.to_str()
    ]
    word = any_kind.token_id("x")
    joined = b"x" + b"".join(any_kind.token_bytes(i) for i in ids)
    assert joined.decode() == any_kind.decode([word, *ids], skip_special_tokens=False)


# ---- over HTTP

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/]{% endfor %}"


class Fixed(ScriptedBackend):
    """Answers with these tokens."""

    names = ("▁the", "▁fox", "▁▁", "x")

    def answer_to(self, request: GenerationRequest) -> list[int]:
        return [self.tokenizer.token_id(name) for name in self.names][: request.params.max_tokens]


@pytest.fixture(scope="module")
def words(mixtral, tmp_path_factory) -> Iterator[tuple[httpx.Client, Tokenizer]]:
    folder = tmp_path_factory.mktemp("words")
    mixtral._vocabulary.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = ServedModel("tiny", str(folder), 256, mixtral.vocab_size, 1_700_000_000)
    server = Server(Fixed(model, mixtral), mixtral, ServerSettings())
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            yield client, mixtral
    finally:
        server.stop()


def completion(client: httpx.Client, **fields: object) -> tuple[str, dict[str, list]]:
    """The text, streamed and not, and what the log-probabilities say; both ways are the same."""
    body = {"model": "tiny", "prompt": "xa", "max_tokens": 4, "logprobs": 1, **fields}
    whole = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
    text, scores = "", {}
    for more in ({"stream": True}, {"stream": True, "resume": 5}):
        lines = client.post("/v1/completions", json={**body, **more}).raise_for_status().text.split("\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        scores = {}
        for chunk in chunks:
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                scores.setdefault(name, []).extend(values)
        assert text == whole["text"] and scores == (whole["logprobs"] or {})
        if "resume" in more:
            lines = client.get(f"/v1/requests/{chunks[0]['id']}/events").text.split("\n")
            again = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "".join(chunk["choices"][0]["text"] for chunk in again) == text
    return text, scores


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    ("prompt", "shown", "text"),
    [
        ("xa", "xa", " the fox  x"),
        (["H", "ello"], "Hello", " the fox  x"),
        (["<s>", "▁Hello"], "<s> Hello", " the fox  x"),
        (["▁Hello"], "Hello", " the fox  x"),
        (["<s>"], "<s>", "the fox  x"),
    ],
)
def test_text_tokens_and_offsets_agree(words, prompt, shown, text, echo):
    client, tokenizer = words
    if not isinstance(prompt, str):
        prompt = [tokenizer.token_id(name) for name in prompt]
    found, scores = completion(client, prompt=prompt, echo=echo)
    assert found == (shown + text if echo else text)
    assert "".join(scores["tokens"]) == found
    starts = [len("".join(scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
    assert scores["text_offset"] == starts


def test_stop_strings_with_a_space_in_front(words):
    client, _ = words
    assert completion(client, stop=[" the"], logprobs=None)[0] == ""
    assert completion(client, stop=[" fox"], logprobs=None)[0] == " the"


@pytest.mark.parametrize("stream", [False, True])
def test_chats_too(words, stream):
    client, _ = words
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "stream": stream,
    }
    reply = client.post("/v1/chat/completions", json={**body, "logprobs": True}).raise_for_status()
    if not stream:
        choice = reply.json()["choices"][0]
        assert choice["message"]["content"] == " the fox  x"
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" the", " fox", "  ", "x"]
        return
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == " the fox  x"
