"""Classes of service: who may choose which, what they change of a request, and how many answers keep their times."""

import re

import httpx
import pytest

from afserve.engine.scheduling.request import MAX_PRIORITY, MAX_TENANT, Tenant
from afserve.errors import ConfigError, OverloadedError, RequestError
from afserve.server.access.accounts import Account
from afserve.server.access.classes import ServiceClass, ServiceClasses, read_classes
from afserve.server.access.key_file import Key, KeyLimits, KeyRole, add_key
from afserve.server.bodies.declared import Scheduling

CLASSES = """
[interactive]
priority = -10
weight = 4
ttft = 60
tpot = 60
retain = 300

[batch]
priority = 500
keys = ["night"]

[finance]
refuse_late = true
ttft = 0.5
keys = ["alice"]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "classes.toml"
    path.write_text(CLASSES)
    return path


def scheduled(classes, asked, key=None, **limits):
    key = key and Key(key, "0" * 64, limits=KeyLimits(**limits))
    return Account(key.name if key else "", key, classes=classes).scheduled(asked)


def test_a_class_says_turn_share_and_times(file):
    classes = read_classes(file)
    found = scheduled(classes, Scheduling(service_class="interactive"))
    assert (found.priority, found.share, found.tenant) == (-10, 4, "/interactive")
    assert (found.ttft, found.tpot, found.retain, found.refuses_late) == (60, 60, 300, False)
    found = scheduled(
        classes, Scheduling(service_class="interactive", priority=7, ttft=1.0, retain=900.0), "bob", share=3
    )
    assert (found.priority, found.share, found.tenant) == (-3, 12, "bob/interactive")
    assert (found.ttft, found.tpot, found.retain, found.refuses_late) == (1, 60, 900, True)
    sooner = scheduled(classes, Scheduling(service_class="interactive", priority=-50))
    assert sooner.priority == -10, "no request comes before its class"
    assert scheduled(classes, Scheduling(service_class="interactive"), "bob", priority=100).priority == 100
    assert scheduled(classes, Scheduling(priority=3)) == Scheduling(priority=3), "of no class"


def test_keys_have_classes_and_classes_keys(file):
    classes = read_classes(file)
    assert scheduled(classes, Scheduling(), "night").priority == 500
    assert scheduled(classes, Scheduling(service_class="interactive"), "night").priority == -10
    assert scheduled(classes, Scheduling(), "alice").refuses_late
    with pytest.raises(RequestError, match="is for other keys"):
        scheduled(classes, Scheduling(service_class="finance"), "night")
    with pytest.raises(RequestError, match="none of interactive, batch, finance"):
        scheduled(classes, Scheduling(service_class="x"))
    with pytest.raises(RequestError, match="no --classes were given"):
        scheduled(ServiceClasses(), Scheduling(service_class="x"))


def test_the_longest_names_and_highest_numbers_fit():
    one = ServiceClass("c" * 32, priority=MAX_PRIORITY, weight=1000)
    found = scheduled(
        ServiceClasses([one]), Scheduling(service_class=one.name, priority=9), "k" * 64, share=1000
    )
    assert found.priority == MAX_PRIORITY and found.share == 1000 and len(found.tenant) == MAX_TENANT
    assert Tenant(found.tenant, found.share).owner == "k" * 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 tables"),
        ("x = 1", "'x': is no table"),
        ('["a b"]', "'a b': is no table"),
        ("[a]\nspeed = 1", "[a] 'speed': is none of priority, weight"),
        ("[a]\npriority = 1.5", "[a] priority: 1.5 is not"),
        ("[a]\nweight = 0", "[a] weight: 0 is not"),
        ("[a]\nttft = true", "[a] ttft: True is not"),
        ("[a]\nrefuse_late = 1", "[a] refuse_late: 1 is neither"),
        ('[a]\nkeys = "x"', "[a] keys: 'x' is no list"),
        ('[a]\nkeys = ["x y"]', "[a] keys: ['x y'] is no list of names of keys"),
        ('[a]\nkeys = ["x"]\n[b]\nkeys = ["x"]', "'x' is a key of a and of b"),
        ("[a", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path, text, words):
    path = tmp_path / "classes.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        read_classes(path)
    assert refused.value.param == "classes"
    with pytest.raises(ConfigError, match="no such file"):
        read_classes(tmp_path / "none")


def test_over_http_by_field_and_by_key(make_backend, run_server, file, tmp_path):
    """What the engine is asked, what is refused, and who kept the times, by class."""
    keys = tmp_path / "keys.toml"
    alice, night = (add_key(keys, name, KeyRole.USER, KeyLimits()) for name in ("alice", "night"))
    root = add_key(keys, "root", KeyRole.ADMIN, KeyLimits())
    backend = make_backend()
    with (
        run_server(backend, keys_file=str(keys), classes_file=str(file)) as server,
        httpx.Client(base_url=server.url) as http,
    ):

        def ask(key, path="/v1/completions", **more):
            body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **more}
            return http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

        assert ask(night).status_code == 200
        assert backend.requests[-1].priority == 500 and backend.requests[-1].tenant == Tenant(
            "night/batch", 1
        )
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
            assert ask(night, path, service_class="interactive").status_code == 200
            asked = backend.requests[-1]
            assert (
                asked.priority == -10
                and asked.tenant == Tenant("night/interactive", 4)
                and asked.retain == 300
            )
            assert backend.admitted[-1][1].ttft is None, "it is judged, and not refused"
        refused = ask(night, service_class="finance")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "service_class"
        backend.too_late = OverloadedError("ttft: too late", retry_after=1.0)
        assert ask(alice).status_code == 429 and backend.admitted[-1][1].ttft == 0.5
        metrics = http.get("/metrics", headers={"authorization": f"Bearer {root}"}).text
        for phase in ("prefill", "decode"):
            labels = f'service_class="interactive",phase="{phase}"'
            assert re.search(
                rf"^afserve_class_sequences_total{{[^}}]*{labels},on_time=\"yes\"}} 3$", metrics, re.M
            )
        status = http.get("/status", headers={"authorization": f"Bearer {root}"}).json()
        assert status["goodput"]["interactive: prefill"]["on_time"] == 3
        assert "batch: prefill" not in status["goodput"], "it has no times"
