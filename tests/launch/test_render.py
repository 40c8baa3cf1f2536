"""Files for a site's own scheduler: what they say, what is refused, and that Kubernetes would take them."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from afserve.cli.main import run
from afserve.cli.node import node
from afserve.cli.render import render
from afserve.cli.up import asked_of, up
from afserve.errors import ConfigError
from afserve.launch.plan.cluster import read_cluster
from afserve.launch.render.kubernetes import RUN, KubernetesSettings, entrypoint, manifests, ray_manifests
from afserve.launch.render.layout import ClusterLayout, Sizes, layout_of
from afserve.launch.render.slurm import SlurmSettings, script
from afserve.member import Role

MINORS = ("1.35", "1.36", "1.37")
TEXT = """
micro_batches = 2
[model]
name = "nano"
[attention]
nodes = 2
tensor_parallel = 1
batch = 64
[experts]
nodes = 4
[[host]]
address = "attention-0.example"
role = "attention"
hardware = "{attention}"
devices = 1
[[host]]
address = "attention-1.example"
role = "attention"
hardware = "{attention}"
devices = 1
[[host]]
address = "experts-0.example"
role = "experts"
hardware = "{experts}"
devices = 2
[[host]]
address = "experts-1.example"
role = "experts"
hardware = "{experts}"
devices = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT.format(attention="cpu-host", experts="cpu-host"))
    return path


def site(file: Path, *, certs: bool = True) -> ClusterLayout:
    return layout_of(read_cluster(file, placeholders=True), Sizes(cpus=2, memory=3), certs=certs)


def objects(file: Path, *, certs: bool = True, **asked: Any) -> list[dict[str, Any]]:
    files = manifests(site(file, certs=certs), KubernetesSettings(**asked))
    return [one for name, found in files.items() if name != "kustomization.yaml" for one in found]


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod of each workload, by the workload's name."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in found
        if one["kind"] in ("Deployment", "StatefulSet")
    }


@pytest.mark.slow
@pytest.mark.parametrize("certs", [True, False])
def test_kubernetes_takes_every_object(file: Path, certs: bool) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="afserve[test] has kubernetes-validate")
    found = objects(file, certs=certs, claim="checkpoints")
    service, network = ray_manifests(site(file), KubernetesSettings())["service.yaml"], "network.yaml"
    found += [*service, *ray_manifests(site(file), KubernetesSettings())[network]]
    for one in found:
        for minor in MINORS:
            validate.validate(one, minor, strict=True)


@pytest.mark.slow
def test_a_misspelled_key_would_be_seen(file: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="afserve[test] has kubernetes-validate")
    one = objects(file)[1]
    one["spec"]["replicaCount"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(one, MINORS[0], strict=True)


@pytest.mark.slow
def test_every_pod_is_without_privilege(file: Path) -> None:
    found = pods(objects(file))
    assert found.keys() == {"controller", "attention", "expert", "gateway"}
    for pod in found.values():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        (box,) = pod["containers"]
        assert box["securityContext"]["readOnlyRootFilesystem"]
        assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not box["securityContext"]["allowPrivilegeEscalation"]
        mounted = {mount["name"] for mount in box["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} >= {"keys", "certs"}


@pytest.mark.slow
def test_the_arguments_are_those_of_the_commands(file: Path) -> None:
    """Read by the commands themselves, with what Kubernetes would put into them."""
    for name, pod in pods(objects(file, certs=False)).items():
        words = [word.replace("$(POD_IP)", "10.1.2.3") for word in pod["containers"][0]["args"]]
        keys = file.parent
        for key in ("token", "api.key", "admin.key"):
            (keys / key).touch()
        words = [word.replace(RUN, str(keys)) for word in words]
        if name == "controller":
            asked = asked_of(dict(up.make_context("up", words[1:]).params))
            assert asked.run.elsewhere and asked.run.listen == "10.1.2.3:7700"
            assert (asked.wishes.attention, asked.wishes.experts, asked.wishes.threads) == (2, 4, 2)
        else:
            assert node.make_context("node", words[1:]).params["role"] == name


@pytest.mark.slow
def test_roles_have_their_own_hosts_and_gpus(file: Path) -> None:
    file.write_text(TEXT.format(attention="h20", experts="h800"))
    found = pods(objects(file, selectors={Role.EXPERT: {"gpu": "h800"}}))
    assert found["attention"]["nodeSelector"] == {"afserve.dev/hardware": "h20"}
    assert found["expert"]["nodeSelector"] == {"gpu": "h800"}
    for role in ("attention", "expert"):
        assert found[role]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_ray_s_head_starts_nodes_where_their_role_is(file: Path) -> None:
    words = entrypoint(site(file, certs=False))
    keys = [word.replace(RUN, str(file.parent)) for word in words[1:]]
    for key in ("api.key", "admin.key"):
        (file.parent / key).touch()
    asked = asked_of(dict(up.make_context("up", keys).params))
    assert dict(asked.ray.bundle(Role.EXPERT, cuda=False)) == {"CPU": 2.0, "afserve_expert": 1.0}
    (job,) = ray_manifests(site(file), KubernetesSettings())["rayjob.yaml"]
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert groups["expert"]["replicas"] == 4
    assert groups["expert"]["rayStartParams"]["resources"] == '"{\\"afserve_expert\\": 1}"'


@pytest.mark.slow
def test_a_folder_is_a_kustomize_base(file: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="afserve[render] has PyYAML")
    out = tmp_path / "base"
    done = CliRunner().invoke(render, ["k8s", str(file), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    base = yaml.safe_load((out / "kustomization.yaml").read_text())
    assert all((out / name).is_file() for name in base["resources"])
    named = {one["name"] for one in base["secretGenerator"]}
    for pod in pods(
        [one for name in base["resources"] for one in yaml.safe_load_all((out / name).read_text())]
    ).values():
        assert {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v} <= named


def test_a_job_script_is_bash_with_options_of_slurm(file: Path, tmp_path: Path) -> None:
    text = script(site(file), SlurmSettings(time="1:00:00"))
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True).stderr == ""
    options = re.findall(r"^#SBATCH (.*)", text, re.MULTILINE)
    assert {"--nodes=4", "--no-kill", "--no-requeue", "--time=1:00:00"} <= set(options)
    assert "hetjob" not in options
    for line in re.findall(r"^srun (.*) \\$", text, re.MULTILINE):
        assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap"} <= set(shlex.split(line))
    (called,) = re.findall(r"^afserve (up .*) \\$", text, re.MULTILINE)
    assert "--elsewhere" in shlex.split(called)


@pytest.mark.parametrize("kind", ["slurm", "k8s", "kuberay"])
def test_out_is_a_folder(
    file: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image = [] if kind == "slurm" else ["--image", "x"]
    words = ["render", kind, "--cpus", "1", "--memory", "1", "--insecure-nodes", *image, str(file), "--out"]
    for folder in (tmp_path / "deep" / "made", tmp_path):
        assert run([*words, str(folder)]) == 0
        said = capsys.readouterr().out
        names = said.removeprefix("wrote ").partition(" in ")[0].split(", ")
        assert all((folder / name).stat().st_size for name in names) and names
    assert run([*words, file.name]) == 2
    assert capsys.readouterr().err == "error: --out 'cluster.toml': File exists; give a folder\n"


def test_other_hardware_is_a_component_of_its_own(file: Path) -> None:
    file.write_text(TEXT.format(attention="h20", experts="h800"))
    text = script(site(file), SlurmSettings(options={Role.EXPERT: ("--partition=big",)}))
    first, second = text.split("#SBATCH hetjob")
    for part in (first, second):
        assert "#SBATCH --no-kill" in part and "#SBATCH --nodes=2" in part
    assert "--het-group=0" in text and "--het-group=1" in text and "#SBATCH --partition=big" in second
    assert "--device cuda --node-memory 79.6" in " ".join(site(file).counts()), "of the smaller GPU, in GiB"


@pytest.mark.parametrize("kind", ["cpu-host", "h20"])
def test_a_component_of_one_host_is_refused(file: Path, kind: str) -> None:
    text = TEXT.format(attention=kind, experts="cpu-host" if kind == "cpu-host" else "h800")
    begin = text.index('[[host]]\naddress = "attention-1')
    end = text.index('[[host]]\naddress = "experts-0')
    one = text[:begin].replace("devices = 1", "devices = 2") + text[end:]
    file.write_text(one)
    if kind == "cpu-host":
        assert "--nodes=3" in script(site(file), SlurmSettings())
    else:
        with pytest.raises(ConfigError, match="write at least 2 hosts"):
            script(site(file), SlurmSettings())


def test_hosts_of_several_kinds_for_a_role_are_refused(file: Path) -> None:
    file.write_text(TEXT.format(attention="cpu-host", experts="cpu-host").replace("cpu-host", "cpu-big", 1))
    with pytest.raises(ConfigError, match="of several kinds"):
        site(file)


def test_a_wrong_label_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["render", "k8s", str(file), "--expert-hosts", "gpu"]) == 2
    assert "--expert-hosts: 'gpu' is not LABEL=VALUE" in capsys.readouterr().err


def test_yaml_is_written_where_there_is_pyyaml() -> None:
    assert importlib.util.find_spec("yaml") is not None, "afserve[test] has it"


@pytest.mark.slow
def test_a_controller_that_asks_for_nodes_has_the_rights_to_and_no_more(file: Path) -> None:
    extra = ("--nodes-from=kubernetes", "--pilot", "act")
    layout = layout_of(read_cluster(file, placeholders=True), Sizes(cpus=2, memory=3), extra=extra)
    files = manifests(layout, KubernetesSettings())
    found = [one for name, several in files.items() if name != "kustomization.yaml" for one in several]
    (role,) = [one for one in found if one["kind"] == "Role"]
    (rule,) = role["rules"]
    assert rule["resources"] == ["statefulsets/scale"] and rule["verbs"] == ["get", "patch"]
    assert sorted(rule["resourceNames"]) == ["attention", "expert"]
    accounts = {name: pod.get("serviceAccountName") for name, pod in pods(found).items()}
    assert accounts == {"controller": "controller", "attention": None, "expert": None, "gateway": None}
    assert "rights.yaml" in files["kustomization.yaml"][0]["resources"]
    assert "rights.yaml" not in manifests(site(file), KubernetesSettings())
    validate = pytest.importorskip("kubernetes_validate", reason="afserve[test] has kubernetes-validate")
    for one in found:
        validate.validate(one, MINORS[0], strict=True)
