"""Reads the cluster file of `afserve up --cluster FILE`; the format is in configs/clusters/README.md.

Text in, checked values out: every error names the file, the key and the value. It looks up no host, no model and
no device; `assignment` does that with what is here.
"""

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afserve.config import MAX_MICRO_BATCHES
from afserve.errors import ConfigError
from afserve.json_file import read_text
from afserve.placement.planner.cluster_file import on_cpu

ROLES = ("attention", "experts")
PLACEHOLDER = ".example"  # reserved by RFC 2606; `afserve plan` writes it where it cannot know a name
_MOST = 1 << 16
_KEYS = {
    "": ("micro_batches", "model", "attention", "experts", "host"),
    "model": ("name", "path"),
    "attention": ("nodes", "tensor_parallel", "batch", "prefill", "prefill_tokens"),
    "experts": ("nodes", "prompt_share"),
    "host": ("address", "role", "hardware", "devices", "memory_gb", "host_memory_gb"),
}


@dataclass(frozen=True, slots=True)
class Host:
    """One machine under one role. `devices` of it are in use, one node on each. `memory`: bytes of each GPU, or of all
    of a CPU's host, and `own_memory` of a GPU's host; 0 where the file does not say."""

    address: str
    role: str
    hardware: str
    devices: int
    memory: int = 0
    own_memory: int = 0

    @property
    def on_cpu(self) -> bool:
        return on_cpu(self.hardware)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the file asks for. `model` is a name or a path; no expert nodes means colocated.

    The first `prefill` attention nodes compute prompts for the others, None: all do both. `prefill_tokens` and
    `prompt_share` None: the engine's own.
    """

    file: Path
    model: str
    micro_batches: int
    attention: int
    experts: int
    batch: int
    hosts: tuple[Host, ...]
    prefill: int | None = None
    prefill_tokens: int | None = None
    prompt_share: float | None = None

    @property
    def decode_nodes(self) -> int | None:
        return None if self.prefill is None else self.attention - self.prefill

    @property
    def device(self) -> str:
        """What attention nodes run on; where some compute prompts for others, the others."""
        return _device_of(self._hosts_of("attention")[-1])

    @property
    def prefill_device(self) -> str:
        """The same of those that compute prompts for others, where there are any."""
        return _device_of(self._hosts_of("attention")[0])

    @property
    def expert_device(self) -> str:
        """The same of expert nodes, or of the experts in attention nodes."""
        return _device_of(self._hosts_of("experts")[0]) if self.experts else self.device

    @property
    def decode_hardware(self) -> str:
        """Its name, of whom `device` is."""
        return self._hosts_of("attention")[-1].hardware

    def _hosts_of(self, role: str) -> list[Host]:
        return [host for host in self.hosts if host.role == role]


def _device_of(host: Host) -> str:
    return "cpu" if host.on_cpu else "cuda"


def read_cluster(path: Path, *, placeholders: bool = False) -> Cluster:
    """`placeholders`: also with the addresses that `afserve plan` writes where it knows none. Raises ConfigError."""
    try:
        table = tomllib.loads(read_text(path, refusal=ConfigError))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--cluster {path}: {error}") from error
    top = _Section(path, "", table)
    attention, experts = top.inner_section("attention"), top.inner_section("experts")
    hosts = tuple(_host(section, placeholders) for section in top.sections("host"))
    cluster = Cluster(
        file=path,
        model=_model(path, top.inner_section("model")),
        micro_batches=top.whole_number("micro_batches", 1, MAX_MICRO_BATCHES),
        attention=attention.whole_number("nodes", 1),
        experts=experts.whole_number("nodes", 0),
        batch=attention.whole_number("batch", 1),
        hosts=hosts,
        prefill=attention.whole_number("prefill", 1) if "prefill" in attention.table else None,
        prefill_tokens=attention.whole_number("prefill_tokens", 1, 1 << 20)
        if "prefill_tokens" in attention.table
        else None,
        prompt_share=experts.number("prompt_share", 0.01, 0.9) if "prompt_share" in experts.table else None,
    )
    if cluster.prefill is not None and cluster.prefill >= cluster.attention:
        attention.refuse_key(
            "prefill",
            f"{cluster.prefill} of {cluster.attention} nodes: some have to decode; write a smaller number",
        )
    width = attention.whole_number("tensor_parallel", 1)
    if width > 1:
        attention.refuse_key(
            "tensor_parallel",
            f"{width}: of a cluster file a node runs on one device (`afserve up --tensor-parallel` starts nodes with "
            "several, on one machine); write 1 and nodes = the number of devices",
        )
    _check_hosts(top, cluster)
    return cluster


def _model(path: Path, section: "_Section") -> str:
    given = [key for key in ("name", "path") if key in section.table]
    if len(given) != 1:
        section.refuse_key("name", "write exactly one of model.name and model.path")
    text = section.text(given[0])
    if given[0] == "name":
        return text
    return str((path.parent / Path(text).expanduser()).resolve())


def _host(section: "_Section", placeholders: bool) -> Host:
    sizes = (
        int(section.number(key, 0.1, 1e5) * 1e9) if key in section.table else 0
        for key in ("memory_gb", "host_memory_gb")
    )
    host = Host(
        section.text("address"),
        section.text("role"),
        section.text("hardware"),
        section.whole_number("devices", 1),
        *sizes,
    )
    if host.on_cpu and host.own_memory:
        section.refuse_key("host_memory_gb", f"{host.hardware} is a CPU; write memory_gb, of all of its host")
    if host.role not in ROLES:
        section.refuse_key("role", f"{host.role!r} is not one of {', '.join(ROLES)}")
    if host.address.lower().endswith(PLACEHOLDER) and not placeholders:
        section.refuse_key(
            "address",
            f"{host.address!r} is a placeholder; write the name or IP of the machine, 127.0.0.1 for this one",
        )
    if any(letter.isspace() or letter in "/@'\"" for letter in host.address) or host.address.startswith("-"):
        section.refuse_key("address", f"{host.address!r} is neither a host name nor an IP address")
    try:
        if ipaddress.ip_address(host.address).is_unspecified:
            section.refuse_key(
                "address", f"{host.address} is no machine; write the address others reach it at"
            )
    except ValueError:
        pass  # a name
    return host


def _check_hosts(top: "_Section", cluster: Cluster) -> None:
    seen: set[tuple[str, str]] = set()
    for number, host in enumerate(cluster.hosts):
        if (host.address, host.role) in seen:
            top.refuse_key(
                f"host {number}", f"{host.address} is listed twice as {host.role}; add the devices up"
            )
        seen.add((host.address, host.role))
    _check_kinds(top, cluster)
    for role, nodes in (("attention", cluster.attention), ("experts", cluster.experts)):
        devices = sum(host.devices for host in cluster.hosts if host.role == role)
        if devices != nodes:
            colocated = " (colocated)" if not nodes else ""
            top.refuse_key(
                f"{role}.nodes",
                f"{nodes}{colocated}, but the {role} hosts have {devices} devices; one node runs on one device",
            )


def _check_kinds(top: "_Section", cluster: Cluster) -> None:
    """Each role's nodes are on one kind of device; prefill nodes, the first of attention, may be on another than decode
    nodes."""
    first: dict[str, Host] = {}
    placed = 0  # attention nodes on the hosts before
    for number, host in enumerate(cluster.hosts):
        groups = [host.role]
        if host.role == "attention" and cluster.prefill is not None:
            both = placed < cluster.prefill, placed + host.devices > cluster.prefill
            groups = [name for name, there in zip(("prefill", "decode"), both, strict=True) if there]
        placed += host.devices * (host.role == "attention")
        for group in groups:
            other = first.setdefault(group, host)
            if host.on_cpu != other.on_cpu:
                top.refuse_key(
                    f"host {number}",
                    f"{host.address} is a {host.hardware}, {other.address} a {other.hardware}; the {group} nodes of "
                    "one run are either all on CPUs or all on CUDA devices",
                )


@dataclass(frozen=True, slots=True)
class _Section:
    """One table of the file, read key by key."""

    file: Path
    name: str
    table: Mapping[str, object]

    def __post_init__(self) -> None:
        known = _KEYS[self.name.partition(" ")[0]]
        for key in self.table:
            if key not in known:
                self.refuse_key(key, f"is not a key here; known are {', '.join(known)}")

    def refuse_key(self, key: str, why: str) -> None:
        where = f"{self.name}.{key}" if self.name else key
        raise ConfigError(f"--cluster {self.file}: {where}: {why}")

    def required(self, key: str) -> object:
        if key not in self.table:
            self.refuse_key(key, "is missing")
        return self.table[key]

    def text(self, key: str) -> str:
        value = self.required(key)
        if not isinstance(value, str) or not value:
            self.refuse_key(key, f"{value!r} is not a text")
        return str(value)

    def whole_number(self, key: str, low: int, high: int = _MOST) -> int:
        value = self.required(key)
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse_key(key, f"{value!r} is not a whole number")
        assert isinstance(value, int)
        if not low <= value <= high:
            self.refuse_key(key, f"{value} is outside [{low}, {high}]")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.required(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.refuse_key(key, f"{value!r} is not a number from {low:g} to {high:,g}")
        assert isinstance(value, int | float)
        return float(value)

    def inner_section(self, key: str) -> "_Section":
        value = self.required(key)
        if not isinstance(value, dict):
            self.refuse_key(key, f"{value!r} is not a table; write [{key}]")
        assert isinstance(value, dict)
        return _Section(self.file, key, value)

    def sections(self, key: str) -> list["_Section"]:
        value = self.required(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            self.refuse_key(key, f"is not a list of tables; write [[{key}]] for each machine")
        assert isinstance(value, list)
        return [_Section(self.file, f"{key} {number}", item) for number, item in enumerate(value)]
