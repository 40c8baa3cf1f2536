"""vLLM's addresses of elastic deployments: what they ask of ours, when they answer, that they need the admin key."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from afserve.control.wire.change_values import Change, Changed, ScaleTo
from afserve.control.wire.view_values import ClusterView, NodeView
from afserve.errors import UnavailableError

SIZE, BUSY = "/scale_elastic_ep", "/is_scaling_elastic_ep"


def _node(name: str, state: str = "ready", phase: str = "both") -> NodeView:
    role = name.partition("-")[0]
    return NodeView(name, role, state, 1, 0.0, 0, None, phase if role == "attention" else "")


WHOLE = (_node("attention-0"), _node("attention-1"), _node("expert-0"))


@pytest.fixture
def cluster(make_backend: Callable, run_server: Callable) -> Iterator:
    """A server whose nodes are `views`, one after another while somebody looks; the last one stays."""
    backend = make_backend()
    backend.views = [WHOLE]

    async def view() -> ClusterView:
        nodes = backend.views.pop(0) if len(backend.views) > 1 else backend.views[0]
        if isinstance(nodes, Exception):
            raise nodes
        return ClusterView(1, nodes, wanted={"attention": 2, "expert": 1, "gateway": 0})

    async def change(change: Change) -> Changed:
        backend.changes.append(change)
        return Changed({"attention": 2}, coming=("attention-1",), going=("attention-7",))

    backend.view, backend.change = view, change
    with (
        run_server(backend, admin_keys=("root",)) as server,
        httpx.Client(
            base_url=server.url, headers={"authorization": "Bearer root"}, timeout=20
        ) as server.admin,
    ):
        yield server


@pytest.mark.slow
def test_the_answer_comes_when_who_comes_serves_and_who_goes_has_gone(cluster):
    alone = (_node("attention-0"), _node("expert-0"))
    leaving = (*WHOLE, _node("attention-7", "draining"))
    away = UnavailableError("no controller")
    cluster.backend.views = [alone, (*alone, _node("attention-1", "loading")), leaving, away, WHOLE]
    answer = cluster.admin.post(SIZE, json={"new_data_parallel_size": 2})
    assert (answer.status_code, answer.json()) == (200, {"message": "Scaled to 2 data parallel engines"})
    assert cluster.backend.changes == [ScaleTo({"attention": "2"})]
    assert cluster.backend.views == [WHOLE]  # it had looked at all before


def test_where_others_read_prompts_it_is_the_nodes_that_decode(cluster):
    reads = replace(WHOLE[0], phase="prefill"), replace(WHOLE[1], phase="decode"), WHOLE[2]
    cluster.backend.views = [reads]
    assert cluster.admin.post(SIZE, json={"new_data_parallel_size": 1}).status_code == 200
    assert cluster.backend.changes == [ScaleTo({"decode": "1"})]


@pytest.mark.slow
def test_it_is_waited_for_no_longer_than_was_asked(cluster):
    cluster.backend.views = [WHOLE[:1]]
    answer = cluster.admin.post(SIZE, json={"new_data_parallel_size": 2, "drain_timeout": 1})
    assert answer.status_code == 408 and "after 1 s; it goes on" in answer.json()["error"]["message"]
    assert len(cluster.backend.changes) == 1


@pytest.mark.parametrize(
    ("nodes", "busy"),
    [
        (WHOLE, False),
        (WHOLE[1:], True),
        ((*WHOLE, _node("attention-2")), True),
        ((*WHOLE[:2], _node("expert-0", "loading")), True),
        ((WHOLE[0], _node("attention-1", "draining"), WHOLE[2]), True),
    ],
)
def test_whether_nodes_come_or_go(cluster, nodes, busy):
    cluster.backend.views = [nodes]
    assert cluster.admin.post(BUSY).json() == {"is_scaling_elastic_ep": busy}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "new_data_parallel_size: is missing"),
        ({"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ({"new_data_parallel_size": True}, "new_data_parallel_size"),
        ({"new_data_parallel_size": "4"}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 1 << 20}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2, "drain_timeout": 0}, "drain_timeout"),
        ({"new_data_parallel_size": 2, "drain_timeout": 1e9}, "drain_timeout"),
    ],
)
def test_what_is_no_size_is_refused_before_anything_changes(cluster, body, said):
    answer = cluster.admin.post(SIZE, json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert not cluster.backend.changes


@pytest.mark.slow
def test_only_with_the_admin_key(cluster, http):
    for path in (SIZE, BUSY):
        for headers in ({"authorization": ""}, {"authorization": "Bearer user"}):
            answer = cluster.admin.post(path, json={"new_data_parallel_size": 2}, headers=headers)
            assert answer.status_code == 401
        answer = http.post(path, headers={"authorization": "Bearer root"})  # a server without such a key
        assert answer.status_code == 401 and f"to use {path}" in answer.json()["error"]["message"]
    assert not cluster.backend.changes
