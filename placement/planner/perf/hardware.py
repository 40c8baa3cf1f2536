"""One kind of device as the planner sees it: peaks, memory, links, watts and price. All figures in SI units.

Built from a parsed `configs/hardware/*.toml`; which share of a peak a kernel reaches is `curve.py`'s business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from afserve.config import ISAS
from afserve.errors import ConfigError
from afserve.placement.planner.perf.fields import TableFields

PRECISIONS = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "int4": 0.5625}
"""Bytes per weight. Four-bit formats carry one scale byte per 16 weights."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """bandwidth and links in bytes/s per device and direction; flops per precision in FLOP/s; 0 = no such unit.

    `devices` share a node; `fast_domain` devices share the fast link (72 in an NVL72 rack, 1 = none). reduce,
    reduce_latency: bytes of the message per second, and seconds, of an all-reduce over the network where that was
    measured (0: not). sources: where a figure is from, by its key in the file. rows_of: the known chip with the same
    figures, where the name is another. maker: of the chip. isa: the instructions of a CPU that compute experts,
    as `afserve up --isa` names them; "" for other devices, or where nobody said.
    """

    name: str
    memory: float
    bandwidth: float
    flops_bf16: float
    flops_fp8: float
    flops_fp4: float
    watts: float
    usd_per_hour: float
    devices: int
    fast_domain: int
    link: float
    link_latency: float
    network: float
    network_latency: float
    reduce: float = 0.0
    reduce_latency: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    rows_of: str = field(default="", compare=False)
    maker: str = "nvidia"
    isa: str = ""

    @property
    def rows_name(self) -> str:
        """The chip whose measured rows are this one's: a copy of a file under another name is no other chip."""
        return self.rows_of or self.name

    def same_figures(self, other: "Hardware") -> bool:
        """Whether both are the same devices, whatever their names, watts and prices."""
        bare = replace(self, name=other.name, watts=other.watts, usd_per_hour=other.usd_per_hour)
        return bare == other

    def flops(self, precision: str) -> float:
        """Peak at this precision; without such units the next wider one computes."""
        if precision in ("fp4", "int4"):
            narrow = self.flops_fp4 if precision == "fp4" else 0.0
            return narrow or (self.flops_fp8 if precision == "fp4" else 0.0) or self.flops_bf16
        return (self.flops_fp8 if precision == "fp8" else 0.0) or self.flops_bf16

    def reach(self, devices: int) -> tuple[float, float]:
        """(bytes/s, latency) of the link that joins a group of this many devices."""
        if self.on_fast_link(devices):
            fast = self.link if self.link > 0 else self.network
            return fast, self.link_latency
        return self.network, self.network_latency

    def on_fast_link(self, devices: int) -> bool:
        """Whether a group of so many devices needs no network."""
        return devices <= max(self.fast_domain, self.devices, 1)

    def priced(self, usd_per_hour: float | None) -> "Hardware":
        if usd_per_hour is None:
            return self
        sources = self.sources_with("usd_per_hour", "--pool NAME=COUNT@USD")
        return replace(self, usd_per_hour=usd_per_hour, sources=sources)

    def sources_with(self, key: str, flag: str) -> dict[str, str]:
        """The sources once that figure was typed."""
        return {**self.sources, key: f"typed, {flag}"}


def hardware_from_table(source: str, table: Mapping[str, object]) -> Hardware:
    """`source` is shown in errors (the file). Raises ConfigError naming file, table and key."""
    fields = TableFields(source, table)
    chip, node = fields.section("chip"), fields.section("node")
    found = Hardware(
        name=fields.section("meta").text("name"),
        memory=chip.number("memory_gb", least=1e-3) * 1e9,
        bandwidth=chip.number("memory_tb_s", least=1e-6) * 1e12,
        flops_bf16=chip.number("bf16_tflops", least=1e-6) * 1e12,
        flops_fp8=chip.number("fp8_tflops", 0.0) * 1e12,
        flops_fp4=chip.number("fp4_tflops", 0.0) * 1e12,
        watts=chip.number("watts"),
        usd_per_hour=chip.number("usd_per_hour", least=1e-6),
        devices=node.integer("devices", least=1),
        fast_domain=node.integer("fast_domain", 1, least=1),
        link=node.number("link_gb_s", 0.0) * 1e9,
        link_latency=node.number("link_latency_us", 5.0) * 1e-6,
        network=node.number("network_gb_s", least=1e-6) * 1e9,
        network_latency=node.number("network_latency_us", 25.0) * 1e-6,
        reduce=node.number("reduce_gb_s", 0.0) * 1e9,
        reduce_latency=node.number("reduce_latency_us", 0.0) * 1e-6,
        sources=_sources(fields),
        maker=fields.section("meta").text("maker", "nvidia"),
        isa=_isa(source, fields.section("meta").text("isa", "")),
    )
    return _checked(source, found)


def _isa(source: str, name: str) -> str:
    if name and name not in ISAS:
        raise ConfigError(
            f"{source}: [meta] isa is {name!r}, which is no instruction set of experts; use one of "
            f"{', '.join(ISAS)}, or leave it out"
        )
    return name


def _sources(fields: TableFields) -> dict[str, str]:
    """[source] may be absent: a file of one's own need not say."""
    if not fields.has("source"):
        return {}
    said = fields.section("source")
    return {key: said.text(key) for key in said.table}


def _checked(source: str, found: Hardware) -> Hardware:
    if found.fast_domain > 1 and found.link <= 0:
        raise ConfigError(
            f"{source}: fast_domain is {found.fast_domain}, so [node] link_gb_s must be above 0"
        )
    return found
