"""vLLM's `--speculative-config`: each of its keys is read, named as passed over, or refused by name."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.config import EngineSettings
from afserve.doors.llm import LLM
from afserve.drafts import DraftChoice, DraftMethod, NgramOptions, SuffixOptions
from afserve.errors import ConfigError
from afserve.speculative_config import FLAG, MOST_CHARACTERS, choice_of

NGRAM = {"method": "ngram"}
SUFFIX = {"method": "suffix"}
FORCED = NGRAM | {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (NGRAM | {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
         DraftChoice(DraftMethod.NGRAM, 5, NgramOptions(2, 4))),
        (NGRAM | {"prompt_lookup_max": 4}, DraftChoice(DraftMethod.NGRAM, None, NgramOptions(4, 4))),
        (NGRAM | {"prompt_lookup_min": 3}, DraftChoice(DraftMethod.NGRAM, None, NgramOptions(3, 3))),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, DraftChoice(DraftMethod.NGRAM, 3)),
        ({"method": "ngram", "model": "ngram"}, DraftChoice(DraftMethod.NGRAM)),
        ({"method": "ngram_gpu", "num_speculative_tokens": 16}, DraftChoice(DraftMethod.NGRAM, 16)),
        (NGRAM | {"model": None, "num_speculative_tokens": None}, DraftChoice(DraftMethod.NGRAM)),
        (SUFFIX, DraftChoice(DraftMethod.SUFFIX)),
        (SUFFIX | {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_spec_factor": 2,
                   "suffix_decoding_min_token_prob": 0.25},
         DraftChoice(DraftMethod.SUFFIX, suffix=SuffixOptions(2, 0.25, earlier=False))),
        (NGRAM | {"rejection_sample_method": "standard"}, DraftChoice(DraftMethod.NGRAM)),
        (FORCED | {"synthetic_acceptance_length": 2.5},
         DraftChoice(DraftMethod.NGRAM, 3, synthetic=(1.0, 0.5, 0.0))),
        (FORCED | {"synthetic_acceptance_length": 4},
         DraftChoice(DraftMethod.NGRAM, 3, synthetic=(1.0, 1.0, 1.0))),
        (FORCED | {"synthetic_acceptance_rates": [0.9, 0.5, 0.5]},
         DraftChoice(DraftMethod.NGRAM, 3, synthetic=(0.9, 0.5, 0.5))),
    ],
)  # fmt: skip
def test_what_is_read(config, wanted):
    assert choice_of(json.dumps(config)) == wanted and not choice_of(json.dumps(config)).passed


@pytest.mark.parametrize(
    ("config", "passed"),
    [
        (NGRAM | {"enforce_eager": True, "quantization": "fp8"}, ("enforce_eager", "quantization")),
        (NGRAM | {"parallel_drafting": False, "max_model_len": None}, ()),
        (NGRAM | {"suffix_decoding_max_tree_depth": 24}, ("suffix_decoding_max_tree_depth",)),
        (SUFFIX | {"prompt_lookup_max": 4}, ("prompt_lookup_max",)),
        ({"method": "deepseek_mtp", "model": "some/v3", "num_speculative_tokens": 1}, ("model",)),
        (SUFFIX | {"suffix_decoding_max_cached_requests": 9}, ("suffix_decoding_max_cached_requests",)),
        (NGRAM | {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, ("a run of fewer than 2 tokens",)),
        (SUFFIX | {"num_speculative_tokens": 32}, ("num_speculative_tokens beyond 16",)),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
         ("num_speculative_tokens_per_batch_size",)),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_named(config, passed):
    assert choice_of(json.dumps(config)).passed == passed


REFUSED = [
    ("{", "cannot be read as JSON"),
    ("", "cannot be read as JSON"),
    ("ngram:4", "cannot be read as JSON"),
    ("[]", "is no JSON object"),
    ("null", "is no JSON object"),
    ("[" * 9000 + "]" * 4000, "cannot be read as JSON"),
    (" " * (MOST_CHARACTERS + 1), f"at most {MOST_CHARACTERS} are read"),
    ('{"method": "ngram", "num_speculative_tokens": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    ('{"method": "ngram", "suffix_decoding_min_token_prob": NaN}', "nan is not a number in [0, 1]"),
    ('{"method": "ngram", "method": "suffix"}', "'method' is there twice"),
    ({}, "method is missing; it is one of ngram, suffix"),
    ({"metod": "ngram"}, "'metod' is no key of it; the nearest is method"),
    (NGRAM | {"num_spec_tokens": 4}, "the nearest is num_speculative_tokens"),
    (NGRAM | {"": 1}, "'' is no key of it"),
    ({"method": 3}, "method: 3 is not a text"),
    ({"method": "ngrams"}, "method: 'ngrams' is none of vLLM's; the methods here are ngram, suffix"),
    ({"method": "eagle3", "model": None}, "method \"eagle3\" needs model: the folder of the head"),
    ({"method": "eagle", "model": "x"}, "method 'eagle': of heads beside the model those of"),
    ({"method": "draft_model"}, 'method "draft_model" needs model: the folder of the draft model'),
    ({"method": "custom_class"}, "no code is loaded"),
    ({"model": ""}, "method is missing"),
    (NGRAM | {"model": "some/head"}, "model: 'some/head': method ngram reads none, those with"),
    ({"method": "suffix", "model": "[ngram]"}, "method suffix reads none"),
    (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens: 0 is not a whole number in [1, "),
    (NGRAM | {"num_speculative_tokens": -3}, "num_speculative_tokens: -3 is not"),
    (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens: True is not"),
    (NGRAM | {"num_speculative_tokens": 4.0}, "num_speculative_tokens: 4.0 is not"),
    (NGRAM | {"num_speculative_tokens": "4"}, "num_speculative_tokens: '4' is not"),
    (NGRAM | {"num_speculative_tokens": 1 << 999}, "an integer of 1000 bits is not"),
    (NGRAM | {"prompt_lookup_max": 17}, "prompt_lookup_max: 17 is not a whole number in [1, 16]"),
    (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min: 5 is more than"),
    (SUFFIX | {"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth: 0 is not"),
    (SUFFIX | {"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob: 1.5 is not"),
    (SUFFIX | {"suffix_decoding_max_spec_factor": "x"}, "suffix_decoding_max_spec_factor: 'x' is not"),
    (NGRAM | {"rejection_sample_method": "odd"}, "rejection_sample_method: 'odd' is none of standard, block"),
    (NGRAM | {"rejection_sample_method": "synthetic"}, "synthetic needs num_speculative_tokens and one of"),
    (FORCED, "synthetic needs num_speculative_tokens and one of"),
    (FORCED | {"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 4}, "and one of"),
    (NGRAM | {"synthetic_acceptance_length": 2.5}, "synthetic_acceptance_length needs rejection_sample_method"),
    (FORCED | {"synthetic_acceptance_length": 4.5}, "synthetic_acceptance_length: 4.5 is not a number in [1, 4]"),
    (FORCED | {"synthetic_acceptance_length": True}, "synthetic_acceptance_length: True is not a number"),
    (
        FORCED | {"num_speculative_tokens": 20, "synthetic_acceptance_rates": [0.5] * 20},
        "which is 16 at most here",
    ),
    (FORCED | {"synthetic_acceptance_rates": [1, 1]}, "has 2 numbers, and 3 tokens are drafted"),
    (FORCED | {"synthetic_acceptance_rates": [1, 1, 2]}, "is not a list of numbers in [0, 1]"),
    (FORCED | {"synthetic_acceptance_rates": [1, 1, True]}, "is not a list of numbers in [0, 1]"),
    (FORCED | {"synthetic_acceptance_rates": "1"}, "is not a list of numbers in [0, 1]"),
    (FORCED | {"synthetic_acceptance_rates": [0.5, 0.6, 0]}, "rises"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_what_is_refused_by_name(config, said):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ConfigError) as refused:
        choice_of(text)
    message = refused.value.message
    assert message.startswith(FLAG) and said in message and len(message) < 400
    assert refused.value.param == "speculative_config"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["method", "model", "num_speculative_tokens", "prompt_lookup_max",
                                        "prompt_lookup_min", "suffix_decoding_max_tree_depth", "enforce_eager",
                                        "rejection_sample_method", "synthetic_acceptance_rates"]), JSON))  # fmt: skip
def test_anything_is_read_or_refused(values):
    try:
        choice = choice_of(json.dumps({"method": "ngram"} | values))
    except ConfigError as error:
        assert error.param == "speculative_config"
    else:
        assert choice.tokens is None or 1 <= choice.tokens <= 16


def test_one_of_both_says_who_drafts(capsys):
    words = json.dumps(NGRAM)
    assert EngineSettings(speculative_config=words).drafts() == EngineSettings(draft="ngram").drafts()
    assert EngineSettings().drafts() == DraftChoice()
    for draft in ("ngram:4", "off"):
        assert run(["up", "--draft", draft, "--speculative-config", words]) == 2
        said = capsys.readouterr().err
        assert f"--speculative-config and --draft {draft} both say who drafts" in said


def test_llm_takes_a_dictionary():
    llm = LLM(speculative_config=NGRAM | {"num_speculative_tokens": 2})
    llm._loop.close()
    assert llm._asked.wishes.engine.drafts().tokens == 2
    for config, said in (
        ({"method": object()}, "not JSON serializable"),
        ({"methods": 1}, "the nearest is method"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(speculative_config=config)


def test_it_is_read_without_torch():
    code = "import sys, afserve.speculative_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
