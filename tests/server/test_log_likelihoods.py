"""Log-likelihoods as lm-eval asks for them, of the bundled model, beside transformers' own."""

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer
from tests.server.conftest import Server
from tests.server.nano import FOLDER, NanoBackend

ASKED = [
    ("def add(x, y):\n", "    return x + y\n"),
    ("import os\n", "print(os.path.join('a', 'b'))"),
    ("", "class Stack:\n    pass"),
    ("for i in range(10):\n    print(i)\n" * 12, "for i in"),
]


@pytest.fixture(scope="module")
def http():
    server = Server(NanoBackend("float32"), Tokenizer.from_folder(FOLDER), ServerSettings())
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client
    finally:
        server.stop()


@pytest.fixture(scope="module")
def oracle():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def encoded():
    """Context and continuation as lm-eval encodes them: together, then cut."""
    tokenizer = Tokenizer.from_folder(FOLDER)
    start = tokenizer.encode("\n", add_special_tokens=False)
    for context, continuation in ASKED:
        before = tokenizer.encode(context, add_special_tokens=False) or start
        yield before, before + tokenizer.encode(continuation, add_special_tokens=False)


def theirs(oracle, ids):
    """Log-probability of each token after the first, and whether it is the likeliest."""
    with torch.no_grad():
        logprobs = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    said = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return said.tolist(), (logprobs[:-1].argmax(-1) == torch.tensor(ids[1:])).tolist()


def ours(choice, before, length):
    """As lm-eval's parse_logprobs reads an answer of one token more than was asked."""
    logprobs = choice["logprobs"]
    tokens = logprobs["token_logprobs"][before:length]
    top = logprobs["top_logprobs"][before:length]
    return tokens, [token == max(best.values()) for token, best in zip(tokens, top, strict=True)]


@pytest.mark.slow
def test_all_at_once_and_again(http, oracle):
    """The second time the prompts are found in the prefix cache."""
    pairs = list(encoded())
    body = {
        "model": "nano",
        "prompt": [ids for _, ids in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    for _ in range(2):
        choices = http.post("/v1/completions", json=body).json()["choices"]
        assert len(choices) == len(pairs)
        for choice, (before, ids) in zip(choices, pairs, strict=True):
            said, likeliest = ours(choice, len(before), len(ids))
            expected, greedy = theirs(oracle, ids)
            assert said == pytest.approx(expected[len(before) - 1 :], abs=2e-4)
            assert all(likeliest) == all(greedy[len(before) - 1 :])


def evaluated(http, **given):
    """lm-eval's own class for servers."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    return completions.LocalCompletionsAPI(
        model="nano",
        base_url=f"{http.base_url}/v1/completions",
        tokenizer=str(FOLDER),
        tokenizer_backend="huggingface",
        batch_size=2,
        **given,
    )


def asked_for(kind, *arguments):
    instance = pytest.importorskip("lm_eval.api.instance")
    return [instance.Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
def test_by_its_own_model_class(http, oracle):
    """What a context ends with in blanks, lm-eval counts to the continuation. It sends token ids: in a text it writes
    the token that begins it, which servers add too."""
    model = evaluated(http)
    pairs = [pair for pair in ASKED if pair[0]]
    found = model.loglikelihood(asked_for("loglikelihood", *pairs))
    for (said, likeliest), pair in zip(found, pairs, strict=True):
        before, behind = model._encode_pair(*pair)
        expected, greedy = theirs(oracle, before + behind)
        assert said == pytest.approx(sum(expected[len(before) - 1 :]), abs=1e-3)
        assert likeliest == all(greedy[len(before) - 1 :])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tokenized", [True, False], ids=["token ids", "text"])
def test_generation_by_its_own_model_class(http, oracle, tokenized):
    model = evaluated(http, tokenized_requests=tokenized, add_bos_token=not tokenized)
    until = {"until": ["\n\n"], "max_gen_toks": 12}
    prompts = [context for context, _ in ASKED if context]
    found = model.generate_until(asked_for("generate_until", *((prompt, until) for prompt in prompts)))
    for said, prompt in zip(found, prompts, strict=True):
        ids = torch.tensor([model.tok_encode(prompt)])
        whole = oracle.generate(
            ids,
            max_new_tokens=12,
            do_sample=False,
            stop_strings=until["until"],
            tokenizer=model.tokenizer,
        )
        text = model.tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        assert said == text.split("\n\n")[0]
