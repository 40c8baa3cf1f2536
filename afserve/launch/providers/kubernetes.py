"""Nodes as pods of StatefulSets: their numbers are patched through the API of the cluster that this process runs in.

It has the rights of its pod's service account, as files that Kubernetes puts there and renews. It knows two calls: read
and patch the scale of a StatefulSet. Those are called as their roles, `attention` and `expert`, as `afserve render k8s`
writes them.
"""

import json
import os
import ssl
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError

from afserve.errors import ConfigError
from afserve.launch.providers.provider import NodeProvider, ProviderError
from afserve.member import Role

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATIENCE = 10.0  # seconds that an answer may take
_ANSWER = 1 << 20  # bytes
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_WHY = {
    401: "the API does not accept the token of {account}; mount a token of a service account that there is",
    403: "the service account of this pod may not {verb} statefulsets/scale in the namespace {namespace}; bind it to a "
    "Role with get and patch for that, as `afserve render k8s` writes it",
    404: "there is no StatefulSet {name} in the namespace {namespace}; apply the manifests of `afserve render k8s`",
    409: "somebody else changes the StatefulSet {name} at the same time",
}


class KubernetesNodes(NodeProvider):
    """`account`: the folder with `token`, `ca.crt` and `namespace`. Raises ConfigError outside of a cluster."""

    def __init__(self, account: Path = ACCOUNT) -> None:
        host, port = os.environ.get(_HOST, ""), os.environ.get(_PORT, "")
        if not host or not port:
            raise ConfigError(
                f"--nodes-from kubernetes: is for a controller in a pod, and {_HOST} or {_PORT} is not set here; see "
                "`afserve render k8s`"
            )
        self._account = account
        self._namespace = self._read("namespace")
        at = f"[{host}]" if ":" in host else host
        self._url = f"https://{at}:{port}/apis/apps/v1/namespaces/{self._namespace}/statefulsets"
        try:
            trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--nodes-from kubernetes: {account / 'ca.crt'} is no certificate that can be read ({error})"
            ) from error
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
        self._opener = urllib.request.build_opener(*handlers)

    def have_nodes(self, role: Role, count: int, join: str) -> None:
        found = self._call("get", role, None)
        spec = found.get("spec")
        if not isinstance(spec, dict) or spec.get("replicas", 0) != count:
            self._call("patch", role, {"spec": {"replicas": count}})

    def call_off(self, join: str) -> None:
        """The StatefulSets stay, as those who applied them want it: the next controller finds its nodes."""

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"--nodes-from kubernetes: {self._account / name} cannot be read ({error}); the pod needs "
                "automountServiceAccountToken"
            ) from error

    def _call(self, verb: str, role: Role, body: dict[str, Any] | None) -> dict[str, Any]:
        """The token is read each time: Kubernetes renews it."""
        headers = {"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(  # noqa: S310  https, from the cluster's own variables
            f"{self._url}/{role}/scale", data, headers, method=verb.upper()
        )
        try:
            with self._opener.open(asked, timeout=_PATIENCE) as answer:
                found = json.loads(answer.read(_ANSWER))
        except HTTPError as error:
            with error:
                self._refused(verb, role, error)
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ProviderError(f"Kubernetes: {self._url} did not answer as it should ({reason})") from error
        if not isinstance(found, dict):
            raise ProviderError(f"Kubernetes: {self._url} answered with no object")
        return found

    def _refused(self, verb: str, role: Role, error: HTTPError) -> NoReturn:
        words = _WHY.get(error.code, "")
        names = {"verb": verb, "name": role, "namespace": self._namespace, "account": self._account}
        why = words.format(**names) if words else _message(error)
        raise ProviderError(f"Kubernetes: {why} (status {error.code})") from error


def _message(error: HTTPError) -> str:
    """What the API says itself, in one line."""
    try:
        said = json.loads(error.read(_ANSWER)).get("message", "")
    except (OSError, HTTPException, ValueError, AttributeError):
        said = ""
    return " ".join(str(said or error.reason).split())[:300]
