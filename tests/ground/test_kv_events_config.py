"""`--kv-events`: endpoints and vLLM's own words, and what is refused by name."""

import json

import pytest

from afserve.config import EngineSettings
from afserve.errors import ConfigError
from afserve.kv_events_config import kv_events_of

VLLM = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:15558",
    "buffer_steps": 500,
    "hwm": 100,
    "max_queue_size": 200,
    "topic": "kv@pod@model",
}


def test_vllms_words_are_read_word_for_word():
    found = kv_events_of(json.dumps(VLLM))
    assert found is not None and found.endpoint.text == "tcp://*:5557" and found.endpoint.binds
    assert found.replay is not None and found.replay.of_node(3) == "tcp://*:15561"
    assert (found.buffer_steps, found.hwm, found.max_queue_size, found.topic) == (
        500,
        100,
        200,
        "kv@pod@model",
    )
    assert found.hash_seed is None and found.encoding == "array"


@pytest.mark.parametrize("off", ["", '{"publisher": "null"}', '{"enable_kv_cache_events": false}'])
def test_nothing_is_told(off):
    assert kv_events_of(off) is None


@pytest.mark.parametrize(
    ("endpoint", "binds", "third"),
    [
        ("tcp://127.0.0.1:5557", True, "tcp://127.0.0.1:5560"),
        ("tcp://[::1]:5557", True, "tcp://[::1]:5560"),
        ("tcp://*:5557", True, "tcp://*:5560"),
        ("tcp://[::]:5557", True, "tcp://[::]:5560"),
        ("ipc:///run/kv", True, "ipc:///run/kv_3"),
        ("tcp://router.example:5557", False, "tcp://router.example:5560"),
        ("tcp://10.0.0.7:5557", False, "tcp://10.0.0.7:5560"),
    ],
)
def test_each_node_has_an_endpoint_of_its_own(endpoint, binds, third):
    found = kv_events_of(endpoint)
    assert found is not None and found.endpoint.binds is binds
    assert found.endpoint.of_node(0) == endpoint and found.endpoint.of_node(3) == third


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5557", "'5557' is no endpoint; write it like tcp://127.0.0.1:5557"),
        ("http://x:80", "is no endpoint"),
        ("tcp://x:0", "the port has to be"),
        ("tcp://x:65535", "the port has to be"),
        ("tcp://x:99999999999", "is no endpoint"),
        ("ipc://", "is no endpoint"),
        ("x" * 5000, "has 5000 characters"),
        ('{"endpoint": 3}', "endpoint: 3 is not a text"),
        ('{"topic": "\\ud800"}', "topic: '\\ud800' is not a text"),
        ('{"hwm": 0}', "hwm: 0 is not"),
        ('{"buffer_steps": true}', "buffer_steps: True is not"),
        ('{"publisher": "nats"}', "publisher: 'nats' is none of zmq, null"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events: 1 is neither"),
        ('{"topik": ""}', "'topik' is no key of it; the nearest is topic"),
        ('{"topic": "", "topic": ""}', "is there twice"),
        ('{"topic": ', "cannot be read as JSON"),
        ('{"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:1"}', "has the port of the endpoint"),
        ('{"replay_endpoint": "tcp://far:1"}', "another host's"),
    ],
)
def test_what_cannot_be_read_is_named(text, words):
    with pytest.raises(ConfigError) as refused:
        kv_events_of(text)
    assert words in str(refused.value) and str(refused.value).startswith("--kv-events: ")


def test_the_setting_is_checked_where_it_is_made():
    with pytest.raises(ConfigError, match="--kv-events: 'x' is no endpoint"):
        EngineSettings(kv_events="x")
    with pytest.raises(ConfigError, match="--kv-events: blocks are found as prefixes are"):
        EngineSettings(kv_events="tcp://127.0.0.1:5557", prefix_caching=False)
