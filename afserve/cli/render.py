"""`afserve render k8s|kuberay|slurm`: files for a site's own scheduler, from a cluster file or a plan."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from afserve.cli.options import existing_file
from afserve.errors import ConfigError, shown
from afserve.launch.plan.cluster import read_cluster
from afserve.launch.render.layout import ClusterLayout, Sizes, layout_of
from afserve.member import Role

Command = TypeVar("Command", bound=Callable[..., Any])
_UP = "What stands after -- is added to the arguments of `afserve up`."


@click.group()
def render() -> None:
    """Write files for a site's own scheduler, from the cluster file that `afserve plan --cluster` writes."""


def _site_options(command: Command) -> Command:
    for option in (
        click.argument("extra", nargs=-1, type=click.UNPROCESSED),
        click.argument("cluster", type=existing_file),
        click.option("--cpus", default=4, show_default=True, type=click.IntRange(1), help="Of each node."),
        click.option(
            "--memory", default=16, show_default=True, type=click.IntRange(1), help="GiB of each node."
        ),
        click.option(
            "--insecure-nodes", is_flag=True, help="Nodes speak plain text; else they have certificates."
        ),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            help="Files in this folder, which is made, instead of the terminal.",
        ),
    ):
        command = option(command)
    return command


def _kubernetes_options(command: Command) -> Command:
    for option in (
        click.option("--image", default="afserve:latest", show_default=True, help="What the pods run."),
        click.option("--namespace", default="afserve", show_default=True),
        click.option("--models", default="", metavar="CLAIM", help="A volume claim, mounted at /models."),
        click.option("--attention-hosts", multiple=True, metavar="LABEL=VALUE", help="Where they may run."),
        click.option(
            "--expert-hosts", multiple=True, metavar="LABEL=VALUE", help="The same of expert nodes."
        ),
    ):
        command = option(command)
    return command


@render.command(epilog=_UP)
@_site_options
@_kubernetes_options
@click.option("--gateways", default=2, show_default=True, type=click.IntRange(1, 64), help="At least.")
@click.option("--most-gateways", default=8, show_default=True, type=click.IntRange(1, 64), help="At most.")
def k8s(
    cluster: Path,
    extra: tuple[str, ...],
    cpus: int,
    memory: int,
    insecure_nodes: bool,
    out: Path | None,
    gateways: int,
    most_gateways: int,
    **asked: Any,
) -> None:
    """Kubernetes objects, and a Kustomize base where --out is a folder."""
    from afserve.launch.render.kubernetes import manifests

    settings = _kubernetes(asked, gateways=gateways, most_gateways=most_gateways)
    _write_yaml(manifests(_layout(cluster, cpus, memory, insecure_nodes, extra), settings), out)


@render.command(epilog=_UP)
@_site_options
@_kubernetes_options
def kuberay(
    cluster: Path,
    extra: tuple[str, ...],
    cpus: int,
    memory: int,
    insecure_nodes: bool,
    out: Path | None,
    **asked: Any,
) -> None:
    """A RayJob for KubeRay, whose head runs `afserve up --ray`."""
    from afserve.launch.render.kubernetes import ray_manifests

    layout = _layout(cluster, cpus, memory, insecure_nodes, extra)
    _write_yaml(ray_manifests(layout, _kubernetes(asked)), out)


@render.command(epilog=_UP)
@_site_options
@click.option("--name", default="afserve", show_default=True, help="Of the job.")
@click.option("--time", "limit", default="", metavar="LIMIT", help="Slurm's --time; else the partition's.")
@click.option("--attention-sbatch", multiple=True, metavar="OPTION", help="Further options of these hosts.")
@click.option("--expert-sbatch", multiple=True, metavar="OPTION", help="The same of the expert nodes' hosts.")
@click.option("--command", default="afserve", show_default=True, help="How afserve is called on the hosts.")
def slurm(
    cluster: Path,
    extra: tuple[str, ...],
    cpus: int,
    memory: int,
    insecure_nodes: bool,
    out: Path | None,
    name: str,
    limit: str,
    attention_sbatch: tuple[str, ...],
    expert_sbatch: tuple[str, ...],
    command: str,
) -> None:
    """A batch script for `sbatch`."""
    from afserve.launch.render.slurm import SlurmSettings, script

    options = {Role.ATTENTION: attention_sbatch, Role.EXPERT: expert_sbatch}
    settings = SlurmSettings(name, limit, options, afserve=command)
    text = script(_layout(cluster, cpus, memory, insecure_nodes, extra), settings)
    if out is None:
        click.echo(text, nl=False)
    else:
        _write_files({"job.sh": text}, out)


def _layout(cluster: Path, cpus: int, memory: int, insecure: bool, extra: tuple[str, ...]) -> ClusterLayout:
    found = read_cluster(cluster, placeholders=True)
    return layout_of(found, Sizes(cpus, memory), certs=not insecure, extra=extra)


def _kubernetes(asked: Mapping[str, Any], **more: int) -> Any:
    from afserve.launch.render.kubernetes import KubernetesSettings

    selectors = {
        role: dict(_label(flag, text) for text in asked[flag[2:].replace("-", "_")])
        for role, flag in ((Role.ATTENTION, "--attention-hosts"), (Role.EXPERT, "--expert-hosts"))
    }
    chosen = {role: labels for role, labels in selectors.items() if labels}
    return KubernetesSettings(
        image=asked["image"], namespace=asked["namespace"], claim=asked["models"], selectors=chosen, **more
    )


def _label(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise ConfigError(f"{flag}: {text!r} is not LABEL=VALUE", param=flag[2:])
    return name, value


def _write_yaml(files: Mapping[str, list[dict[str, Any]]], out: Path | None) -> None:
    """With a folder, one file each; else all objects that Kubernetes takes, in one stream."""
    import yaml

    if out is None:
        objects = [one for name, found in files.items() if name != "kustomization.yaml" for one in found]
        click.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)
        return
    _write_files({name: yaml.safe_dump_all(found, sort_keys=False) for name, found in files.items()}, out)


def _write_files(texts: Mapping[str, str], out: Path) -> None:
    """Into the folder `out`, which is made. Raises ConfigError where it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {shown(str(error.filename))}: {error.strerror}; give a folder") from error
    click.echo(f"wrote {', '.join(texts)} in {out}")
