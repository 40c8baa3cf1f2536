"""Schedulers that bring nodes: a real HTTPS server that speaks Kubernetes' API, and programs in Slurm's place."""

import json
import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from afserve.errors import ConfigError
from afserve.launch.providers.kubernetes import KubernetesNodes
from afserve.launch.providers.provider import AGAIN_SECONDS, NodeOrders, ProviderError
from afserve.launch.providers.slurm import SlurmNodes
from afserve.member import Role

JOIN = "10.0.0.1:7700"
Issued = Callable[..., Path]


class Api(HTTPServer):
    """Scales of StatefulSets. `refuses` by verb: a status instead of an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Scales)
        self.replicas = {"attention": 1, "expert": 2}
        self.refuses: dict[str, int] = {}
        self.token = "of-the-pod"
        self.said: list[tuple[str, str, object]] = []


class Scales(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(None)

    def do_PATCH(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: object) -> None:
        api = self.server
        assert isinstance(api, Api)
        parts = self.path.split("/")
        assert parts[:5] == ["", "apis", "apps", "v1", "namespaces"] and parts[-1] == "scale"
        name = parts[-2]
        api.said.append((self.command, f"{parts[5]}/{name}", body))
        status = api.refuses.get(self.command, 200)
        if self.headers["authorization"] != f"Bearer {api.token}":
            status = 401
        elif name not in api.replicas:
            status = 404
        elif body is not None and status == 200:
            assert self.headers["content-type"] == "application/merge-patch+json" and isinstance(body, dict)
            api.replicas[name] = body["spec"]["replicas"]
        scale = {"kind": "Scale", "spec": {"replicas": api.replicas.get(name)}}
        text = json.dumps(scale if status == 200 else {"kind": "Status", "message": "not\nnow"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def api(issued: Issued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """Beside it `account`, what Kubernetes puts into a pod."""
    certs = issued("controller", addresses=("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "node.pem")
    with Api() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        account = tmp_path / "account"
        account.mkdir()
        (account / "token").write_text(server.token + "\n")
        (account / "namespace").write_text("serving")
        (account / "ca.crt").write_bytes((certs / "authority.pem").read_bytes())
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def test_replicas_are_patched_where_they_differ(api: Api, tmp_path: Path) -> None:
    nodes = KubernetesNodes(tmp_path / "account")
    nodes.have_nodes(Role.EXPERT, 2, JOIN)
    nodes.have_nodes(Role.EXPERT, 5, JOIN)
    nodes.have_nodes(Role.EXPERT, 5, JOIN)
    read = "GET", "serving/expert", None
    assert api.said == [read, read, ("PATCH", "serving/expert", {"spec": {"replicas": 5}}), read]
    assert api.replicas == {"attention": 1, "expert": 5}


def test_a_token_that_was_renewed_is_read_anew(api: Api, tmp_path: Path) -> None:
    nodes = KubernetesNodes(tmp_path / "account")
    api.token = "the-next"
    with pytest.raises(ProviderError, match=r"does not accept the token.*\(status 401\)"):
        nodes.have_nodes(Role.EXPERT, 3, JOIN)
    (tmp_path / "account/token").write_text(api.token)
    nodes.have_nodes(Role.EXPERT, 3, JOIN)
    assert api.replicas["expert"] == 3


@pytest.mark.parametrize(
    ("verb", "status", "says"),
    [
        ("GET", 403, "may not get statefulsets/scale in the namespace serving; bind it to a Role"),
        ("PATCH", 403, "may not patch statefulsets/scale in the namespace serving; bind it to a Role"),
        ("PATCH", 409, "somebody else changes the StatefulSet expert"),
        ("PATCH", 500, r"Kubernetes: not now \(status 500\)"),
    ],
)
def test_a_refusal_says_what_would_mend_it(
    api: Api, tmp_path: Path, verb: str, status: int, says: str
) -> None:
    api.refuses[verb] = status
    with pytest.raises(ProviderError, match=says):
        KubernetesNodes(tmp_path / "account").have_nodes(Role.EXPERT, 3, JOIN)
    assert api.replicas["expert"] == 2


def test_no_stateful_set_and_another_authority(api: Api, tmp_path: Path, issued: Issued) -> None:
    nodes = KubernetesNodes(tmp_path / "account")
    del api.replicas["expert"]
    with pytest.raises(ProviderError, match="no StatefulSet expert in the namespace serving"):
        nodes.have_nodes(Role.EXPERT, 3, JOIN)
    (tmp_path / "account/ca.crt").write_text(ssl.DER_cert_to_PEM_cert(b"none"))
    with pytest.raises(ConfigError, match=r"ca.crt is no certificate"):
        KubernetesNodes(tmp_path / "account")


def test_outside_of_a_cluster_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set"):
        KubernetesNodes(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match=r"namespace cannot be read .*automountServiceAccountToken"):
        KubernetesNodes(tmp_path)


SBATCH = """#!/bin/sh
echo "$@" >> {folder}/submitted
n=$(wc -l < {folder}/submitted)
for word in "$@"; do case $word in --job-name=*) name=${{word#--job-name=}};; esac; done
echo "$n PENDING $name" >> {folder}/jobs
echo $n
"""
SQUEUE = """#!/bin/sh
for word in "$@"; do case $word in --name=*) name=${{word#--name=}};; esac; done
grep " $name$" {folder}/jobs 2>/dev/null | cut -d' ' -f1,2
exit 0
"""
SCANCEL = """#!/bin/sh
echo "$@" >> {folder}/cancelled
for word in "$@"; do sed -i "/^$word /d" {folder}/jobs; done
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what its commands were given."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        (bin_ / name).write_text(text.format(folder=tmp_path))
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    return tmp_path


def words(slurm: Path, name: str) -> list[str]:
    path = slurm / name
    return path.read_text().splitlines() if path.exists() else []


def test_a_job_for_each_node_and_those_that_wait_are_cancelled(slurm: Path) -> None:
    nodes = SlurmNodes("--mem=16G --partition=big", Path("/shared/token"), ["--insecure-nodes"])
    nodes.have_nodes(Role.EXPERT, 2, JOIN)
    nodes.have_nodes(Role.EXPERT, 2, JOIN)
    nodes.have_nodes(Role.ATTENTION, 1, JOIN)
    submitted = words(slurm, "submitted")
    assert len(submitted) == 3 and all("--mem=16G --partition=big" in line for line in submitted)
    wrapped = f"afserve node --role expert --join {JOIN} --token-file /shared/token --insecure-nodes"
    assert f"--wrap={wrapped}" in submitted[0]
    jobs = (slurm / "jobs").read_text()
    (slurm / "jobs").write_text(jobs.replace("1 PENDING", "1 RUNNING"))
    nodes.have_nodes(Role.EXPERT, 1, JOIN)
    assert words(slurm, "cancelled") == ["2"] and len(words(slurm, "jobs")) == 2
    nodes.have_nodes(Role.EXPERT, 1, JOIN)
    assert words(slurm, "cancelled") == ["2"], "a node that runs ends by itself"


def test_a_job_that_has_gone_is_followed_by_another(slurm: Path) -> None:
    nodes = SlurmNodes("", Path("/shared/token"), [])
    nodes.have_nodes(Role.EXPERT, 1, JOIN)
    (slurm / "jobs").write_text("")
    SlurmNodes("", Path("/shared/token"), []).have_nodes(Role.EXPERT, 1, JOIN)
    assert len(words(slurm, "submitted")) == 2


def test_what_slurm_refuses_is_said_in_its_words(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid\n partition' >&2\nexit 1\n")
    nodes = SlurmNodes("", Path("/shared/token"), [])
    with pytest.raises(
        ProviderError, match="sbatch ended with exit code 1: sbatch: error: invalid partition"
    ):
        nodes.have_nodes(Role.EXPERT, 1, JOIN)
    monkeypatch.setenv("PATH", str(slurm))
    with pytest.raises(ConfigError, match="sbatch is not on PATH"):
        SlurmNodes("", Path("/shared/token"), [])


class Recorded(SlurmNodes):
    def __init__(self) -> None:
        self.asked: list[tuple[Role, int]] = []
        self.fails = ""

    def have_nodes(self, role: Role, count: int, join: str) -> None:
        self.asked.append((role, count))
        if self.fails:
            raise ProviderError(self.fails)


def test_it_is_asked_when_counts_change_and_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    provider, one = Recorded(), {Role.EXPERT: 1}
    asked = NodeOrders(provider)
    for now in (0.0, 1.0, AGAIN_SECONDS - 1, AGAIN_SECONDS + 1):
        asked.follow_counts(one, JOIN, now)
    assert provider.asked == [(Role.EXPERT, 1)] * 2
    provider.fails = "no room"
    with caplog.at_level(logging.WARNING):
        for now in (100.0, 101.0, 101.0 + AGAIN_SECONDS):
            asked.follow_counts({Role.EXPERT: 2}, JOIN, now)
    assert provider.asked[2:] == [(Role.EXPERT, 2)] * 2
    assert [record.getMessage() for record in caplog.records] == ["nodes were not asked for: no room"]
