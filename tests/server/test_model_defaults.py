"""What generation_config.json recommends is what a request without the field gets."""

import json

import pytest

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.sampling import model_defaults, sampling_params


def write(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return model_defaults(folder)


def test_absent_file_and_absent_fields(tmp_path):
    assert model_defaults(tmp_path) == SamplingParams()
    assert write(tmp_path, eos_token_id=3, temperature=None) == SamplingParams()


def test_the_request_wins_over_the_model_and_the_model_over_the_api(tmp_path):
    plain = write(tmp_path, temperature=0.6, top_p=0.9, top_k=20, do_sample=True)
    params = sampling_params(Fields({"top_p": 0.5}), plain, max_tokens=3, logprobs=None)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.5, 20, 3)


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": True}])
def test_a_bad_recommendation_is_named(tmp_path, values):
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        write(tmp_path, **values)
