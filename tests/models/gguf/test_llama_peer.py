"""Against llama.cpp itself, where XLLAMACPP_PYTHON names a Python with the package `xllamacpp`: answers to 50 prompts,
and the tokens of 10,000 strings by vocabularies of real models, which lie in a checkout of llama.cpp (LLAMA_CPP).
"""

import dataclasses
import json
import os
import random
import subprocess
import unicodedata
from pathlib import Path

import pytest
import torch

import afserve
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import SamplingParams
from afserve.gguf.metadata import Metadata
from afserve.gguf.splitting import SPLITTINGS
from afserve.gguf.vocabulary import vocabulary_of
from afserve.models.gguf.folder import unfold
from afserve.models.shards import ShardFile
from tests.engine.driving import collect, config, drive, requests
from tests.models.gguf import writing
from tests.models.gguf.conftest import build
from tests.models.gguf.strings import strings

PYTHON = os.environ.get("XLLAMACPP_PYTHON", "")
LLAMA = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
NANO = Path(afserve.__file__).parent / "configs" / "nano"
PROMPTS, LENGTH = 50, 24
CLOSE = 0.01  # between two best log-probabilities: float32 rounds less, in whatever order it adds
ENDS = {"tokenizer.ggml.eos_token_id": 2047, "tokenizer.ggml.bos_token_id": 2046}
NAMES = ("command-r", "gpt-2", "llama-bpe", "llama-spm", "qwen2", "qwen35", "starcoder")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="XLLAMACPP_PYTHON names no Python with xllamacpp"),
]


def llama(path, **job):
    (path / "job").write_text(json.dumps(job), encoding="utf-8")
    command = [
        PYTHON,
        str(Path(__file__).with_name("llama_worker.py")),
        str(path / "job"),
        str(path / "answer"),
    ]
    ran = subprocess.run(command, capture_output=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")[-2000:]
    return json.loads((path / "answer").read_text())


@pytest.fixture(scope="module")
def prompts():
    """What nano itself says, a seed to a prompt."""
    torch.set_num_threads(1)
    sampled = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    asked = requests([[1]] * PROMPTS, sampled)
    seeded = [
        dataclasses.replace(one, params=dataclasses.replace(sampled, seed=at)) for at, one in enumerate(asked)
    ]
    said = collect(drive(colocated(ModelSource(str(NANO), "nano"), config()), seeded))
    return [[1, *answer] for answer in said]


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0"])
def test_answers_are_those_of_llama_cpp(kind, prompts, tmp_path, monkeypatch):
    """Of blocks here, and of the numbers that they stand for there: its own products with blocks round rows to 8 bits.
    Nano's layer of multi-token prediction is left out."""
    gguf = pytest.importorskip("gguf", reason="llama.cpp's package quantises")
    number = gguf.GGMLQuantizationType[kind]
    renamed = writing.renamed

    def without_predictor(folder):
        return {name: x for name, x in renamed(folder).items() if not name.startswith("blk.5.")}

    def blocks(name, x):
        if x.dim() < 2 or "ffn_gate_inp" in name or x.shape[-1] % 32:
            return None
        return gguf.quants.quantize(x.float().numpy().reshape(-1, x.shape[-1]), number)

    def packed(name, x):
        made = blocks(name, x)
        return writing.stored(x.float()) if made is None else (int(number), tuple(x.shape), made.tobytes())

    def plain(name, x):
        made = blocks(name, x)
        values = (
            x.float()
            if made is None
            else torch.from_numpy(gguf.quants.dequantize(made, number)).view(x.shape)
        )
        return writing.stored(values)

    monkeypatch.setattr(writing, "renamed", without_predictor)
    ours = unfold(writing.convert(NANO, tmp_path / "packed.gguf", packed, **ENDS), tmp_path / "ours")
    theirs = writing.convert(NANO, tmp_path / "plain.gguf", plain, **ENDS)
    wanted = llama(tmp_path, file=str(theirs), prompts=prompts, length=LENGTH)
    greedy = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    got = collect(
        drive(colocated(ModelSource(str(ours), "m", dtype="float32"), config()), requests(prompts, greedy))
    )
    same = 0
    for answer, places in zip(got, wanted, strict=True):
        ids = [token for token, _ in places]
        first = next(
            (at for at, pair in enumerate(zip(answer, ids, strict=True)) if pair[0] != pair[1]), None
        )
        same += first is None
        if first is not None:
            (_, best), (second, other) = places[first][1][:2]
            assert best - other < CLOSE and answer[first] == second
    assert same > 0.9 * PROMPTS


@pytest.mark.parametrize(("name", "more"), [("mixtral", {}), ("olmoe", {"num_key_value_heads": 4})])
def test_log_probabilities_of_random_weights(name, more, tmp_path):
    """Turned queries and keys, norms over all heads, routers that renormalise or do not: in float32 to 1e-4 of what
    llama.cpp says, if it does not round by itself. A token of a whole character each: it tells no others."""
    folder = build(name, tmp_path / "hf", vocab_size=128, **more)
    told = [
        token if token.isascii() and "PAD" not in token else f"w{at}"
        for at, token in enumerate(writing.letters(128)["tokenizer.ggml.tokens"])
    ]
    words = {"tokenizer.ggml.tokens": told, "tokenizer.ggml.token_type": [1] * 128}
    ends = {"tokenizer.ggml.eos_token_id": 127, "tokenizer.ggml.bos_token_id": 126}
    theirs = writing.convert(folder, tmp_path / "theirs.gguf", **words, **ends)
    ours = unfold(writing.convert(folder, tmp_path / "ours.gguf"), tmp_path / "ours")
    draw = random.Random(1)
    asked = [[draw.randrange(120) for _ in range(draw.randint(4, 40))] for _ in range(PROMPTS)]
    wanted = llama(tmp_path, file=str(theirs), prompts=asked, length=LENGTH)
    whole = [prompt + [token for token, _ in said] for prompt, said in zip(asked, wanted, strict=True)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    node = colocated(ModelSource(str(ours), "m", dtype="float32"), config())
    events = drive(node, requests(whole, params))
    entries = {one.handle: one.prompt_logprobs for one in events if one.prompt_logprobs}
    for at, (prompt, said) in enumerate(zip(asked, wanted, strict=True)):
        assert len(said) == LENGTH
        theirs_L = [dict(map(tuple, best))[token] for token, best in said]
        ours_L = [one.logprob for one in entries[at][len(prompt) :]]
        assert ours_L == pytest.approx(theirs_L, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_llama_cpp(name, tmp_path):
    """Qwen's tokenizers compose characters first, and llama.cpp does not. deepseek-llm is not here: llama.cpp takes
    U+3000 for a space that no class of its expressions has; the model's own tokenizer finds it in one."""
    path = LLAMA / "models" / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip("LLAMA_CPP names no llama.cpp")
    with ShardFile(path) as file:
        header = file.gguf_header().metadata
    metadata = Metadata(header, name)
    size = len(metadata.texts("tokenizer.ggml.tokens"))
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "moe_intermediate_size": 32, "intermediate_size": 32}
    folder = build("qwen3", tmp_path / "hf", vocab_size=size, tie_word_embeddings=True, **tiny)
    kept = {
        key: list(x) if hasattr(x, "itemsize") else x
        for key, x in header.items()
        if key.startswith("tokenizer.")
    }
    tensors = {
        key: writing.stored(x.float()) for key, x in writing.renamed(folder).items() if key != "output.weight"
    }
    model = writing.write(tmp_path / "m.gguf", {**writing.described(folder), **kept}, tensors)
    rule = SPLITTINGS.get(metadata.string("tokenizer.ggml.pre", "default"))
    texts = strings(10_000)
    if rule is not None and rule.composed:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    made = vocabulary_of(metadata, size).tokenizer
    wanted = llama(tmp_path, file=str(model), texts=texts)
    for text, ids in zip(texts, wanted, strict=True):
        assert made.encode(text, add_special_tokens=False).ids == ids, text
