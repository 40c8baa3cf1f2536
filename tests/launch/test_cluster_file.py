"""Cluster files: what is read, what is refused and how, and who sits where. Values only."""

from dataclasses import replace
from pathlib import Path

import pytest

from afserve.config import EngineConfig, EngineSettings, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.cluster import Host, read_cluster
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.host_memory import memories, with_own_memory
from afserve.launch.plan.hosts import HostAssignment, assign, look_up, own_addresses
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import RunSettings, Share, UpFlags, Wishes
from afserve.launch.render.layout import Sizes, layout_of
from afserve.launch.sites.hosts import assigned_by
from afserve.member import AttentionPhase, Role, attention_node, expert_node
from afserve.server.http.settings import Listening, ServerSettings
from afserve.spec import ModelSpec

TEXT = """
micro_batches = 2
[model]
name = "nano"
[attention]
nodes = 2
tensor_parallel = 1
batch = 64
[experts]
nodes = 3
[[host]]
address = "10.0.0.1"
role = "attention"
hardware = "cpu-host"
devices = 2
[[host]]
address = "there"
role = "experts"
hardware = "cpu-host"
devices = 3
"""
OWN = frozenset({"127.0.0.1", "10.0.0.1", "fd00::1"})
NAMES = {"localhost": {"127.0.0.1", "::1"}, "there": {"10.0.0.2"}}


def resolve(name: str) -> frozenset[str]:
    return frozenset(NAMES.get(name, {name}))


def assigned(path: Path, text: str = TEXT, listen: str | None = None) -> HostAssignment:
    path.write_text(text)
    return assign(read_cluster(path), listen, resolve, OWN)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.toml"


def test_a_file_is_read(file: Path) -> None:
    file.write_text(TEXT)
    cluster = read_cluster(file)
    assert (cluster.model, cluster.micro_batches, cluster.batch, cluster.device) == ("nano", 2, 64, "cpu")
    assert (cluster.attention, cluster.experts) == (2, 3)
    assert cluster.hosts[1] == Host("there", "experts", "cpu-host", 3)


def test_a_path_is_relative_to_the_file(file: Path) -> None:
    file.write_text(TEXT.replace('name = "nano"', 'path = "weights"'))
    assert read_cluster(file).model == str(file.parent.resolve() / "weights")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("micro_batches = 2", "micro_batches = 5", "micro_batches: 5 is outside [1, 4]"),
        ("micro_batches = 2", "micro_batches = 2.5", "micro_batches: 2.5 is not a whole number"),
        ("micro_batches = 2", "", "micro_batches: is missing"),
        ("micro_batches = 2", "microbatches = 2", "microbatches: is not a key here; known are micro_batches"),
        ("nodes = 2", "nodes = 0", "attention.nodes: 0 is outside [1, 65536]"),
        ("nodes = 2", "nodes = true", "attention.nodes: True is not a whole number"),
        ("nodes = 2", "nodes = 4", "attention.nodes: 4, but the attention hosts have 2 devices"),
        ("nodes = 3", "nodes = 0", "experts.nodes: 0 (colocated), but the experts hosts have 3 devices"),
        ("nodes = 3", "nodes = 3\ngpus = 1", "experts.gpus: is not a key here"),
        (
            "tensor_parallel = 1",
            "tensor_parallel = 4",
            "attention.tensor_parallel: 4: of a cluster file a node",
        ),
        ('name = "nano"', "", "model.name: write exactly one of model.name and model.path"),
        ('name = "nano"', 'name = ""', "model.name: '' is not a text"),
        ('"there"', '"experts-0.example"', "host 1.address: 'experts-0.example' is a placeholder; write"),
        ('"there"', '"0.0.0.0"', "host 1.address: 0.0.0.0 is no machine"),
        ('"there"', '"a b"', "host 1.address: 'a b' is neither a host name nor an IP address"),
        ('"there"', "7", "host 1.address: 7 is not a text"),
        (
            "devices = 2",
            "devices = 2\nmemory_gb = 0",
            "host 0.memory_gb: 0 is not a number from 0.1 to 100,000",
        ),
        ('role = "experts"', 'role = "expert"', "host 1.role: 'expert' is not one of attention, experts"),
        ('"there"\nrole = "experts"', '"10.0.0.1"\nrole = "attention"', "host 1: 10.0.0.1 is listed twice"),
        (
            "devices = 3",
            'devices = 2\n[[host]]\naddress = "too"\nrole = "experts"\nhardware = "h20"\ndevices = 1',
            "host 2: too is a h20, there a cpu-host; the experts nodes of one run are either all on CPUs",
        ),
        ("[experts]\nnodes = 3", "", "experts: is missing"),
        ("[model]", "[model", "line 3"),
    ],
)
def test_what_is_wrong_is_named(file: Path, old: str, new: str, said: str) -> None:
    assert old in TEXT
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_cluster(file)
    assert caught.value.message.startswith(f"--cluster {file}: ")
    assert said in caught.value.message


@pytest.mark.parametrize("hosts", ["", "host = []", 'host = ["a"]', "[host]\naddress = 'a'"])
def test_hosts_must_be_tables(file: Path, hosts: str) -> None:
    head = TEXT.partition("[[host]]")[0]
    file.write_text(hosts + head if hosts.startswith("host =") else head + hosts)
    with pytest.raises(ConfigError, match="host: is"):
        read_cluster(file)


def test_a_host_elsewhere_gets_lines_to_run(file: Path) -> None:
    hosted = assigned(file)
    assert [str(s.node) for s in hosted.here] == ["attention-0", "attention-1"]
    assert [str(s.node) for s in hosted.elsewhere] == ["expert-0", "expert-1", "expert-2"]
    assert (hosted.listen, hosted.port) == ("10.0.0.1", 0)
    assert set(hosted.node_counts()) == {Share(2, 0, here=True), Share(0, 3, here=False)}
    lines = hosted.commands("10.0.0.1:77", Path("/run/a b/token"))
    assert lines[0] == "here:  scp -p '/run/a b/token' there:afserve.token"
    assert lines[1:] == [
        "there:  afserve host --join 10.0.0.1:77 --token-file afserve.token --insecure-nodes"
    ]
    assert hosted.commands("10.0.0.1:77", Path("t"), Path("/etc/a b"))[1].endswith(" --certs '/etc/a b'")
    (place,) = hosted.places
    assert (place.name, place.addresses) == ("there", {"10.0.0.2"})
    assert [str(node) for node in place.nodes] == ["expert-0", "expert-1", "expert-2"]


def test_all_here_needs_no_network(file: Path) -> None:
    hosted = assigned(file, TEXT.replace('"there"', '"localhost"'))
    assert (hosted.listen, hosted.elsewhere) == ("127.0.0.1", [])
    assert hosted.node_counts() == (Share(2, 3),)


def test_devices_of_one_machine_are_numbered_through(file: Path) -> None:
    text = TEXT.replace("cpu-host", "h20").replace('"there"', '"localhost"')
    assert [s.device for s in assigned(file, text).hosted] == [f"cuda:{n}" for n in range(5)]
    apart = assigned(file, TEXT.replace("cpu-host", "h20")).devices
    found = apart[attention_node(1)], apart[expert_node(0)], apart[expert_node(2)]
    assert found == ("cuda:1", "cuda:0", "cuda:2")


@pytest.mark.parametrize("on_gpus", ["attention", "experts"])
def test_each_role_may_have_its_own_kind_of_device(file: Path, on_gpus: str) -> None:
    text = TEXT.replace(f'"{on_gpus}"\nhardware = "cpu-host"', f'"{on_gpus}"\nhardware = "h20"')
    hosted = assigned(file, text.replace('"there"', '"localhost"'))
    cluster = read_cluster(file)
    kinds = {"attention": cluster.device, "experts": cluster.expert_device}
    assert kinds == {"attention": "cpu", "experts": "cpu"} | {on_gpus: "cuda"}
    cuda = [one.device for one in hosted.hosted if one.device != "cpu"]
    assert cuda == [f"cuda:{n}" for n in range(len(cuda))]
    assert {one.node.role for one in hosted.hosted if one.device != "cpu"} == {
        Role.ATTENTION if on_gpus == "attention" else Role.EXPERT
    }


PHASES = TEXT.replace("batch = 64", "batch = 64\nprefill = 1").replace(
    """address = "10.0.0.1"
role = "attention"
hardware = "cpu-host"
devices = 2""",
    """address = "10.0.0.1"
role = "attention"
hardware = "h20"
devices = 1
[[host]]
address = "localhost"
role = "attention"
hardware = "cpu-host"
devices = 1""",
)


def test_prefill_nodes_may_have_another_kind_of_device_than_decode_nodes(file: Path) -> None:
    """Blocks are of one size, so that they can be handed over; what not every node could have is refused by name."""
    hosted = assigned(file, PHASES.replace('"there"', '"localhost"'))
    cluster = read_cluster(file)
    assert (cluster.prefill_device, cluster.device, cluster.expert_device) == ("cuda", "cpu", "cpu")
    found = [one.device for one in hosted.hosted if one.node.role is Role.ATTENTION]
    assert found == ["cuda:0", "cpu"]
    folder = CONFIGS / "nano"
    source, spec = ModelSource(str(folder), "nano"), load_spec(folder)
    machine = Machine(cores=8, memory=64 << 30, memory_total=64 << 30)

    def chosen(spec: ModelSpec = spec, **engine: str) -> EngineConfig:
        shares = (Share(1, 0), Share(1, 1, here=False))
        wishes = Wishes(
            2, 1, prefill=1, decode=1, engine=EngineSettings(**engine), prefill_device="cuda", hosts=shares
        )
        return choose(spec, source, machine, wishes).deployment.engine

    assert chosen().block_size == 64 and chosen().dense_dtype == "auto"
    in_blocks = replace(spec, fp8_block=(128, 128))
    assert chosen(in_blocks).dense_dtype == chosen(in_blocks, dense_dtype="model").dense_dtype == "model"
    for engine, said in (
        ({"isa": "avx2"}, "--isa: avx2 is of the kernels of CPUs, --device cuda has others"),
        (
            {"dense_dtype": "int8"},
            "prefill nodes on cuda and decode nodes on cpu would not round weights alike",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            chosen(**engine)


GIB, NONE, NANO = 1 << 30, Gpus(), load_spec(CONFIGS / "nano")
HOSTS = (Share(2, 0), Share(0, 3, here=False))


def shares(file: Path, text: str, gpus: Gpus = NONE) -> tuple[tuple[Share, ...], Gpus | None]:
    assignment = assigned(file, text)
    return memories(read_cluster(file), assignment, Machine(2, 4 * GIB, 8 * GIB), gpus)


def test_each_host_has_its_own_memory(file: Path) -> None:
    """Prompts on this machine's GPU, decoding and experts on its CPU and on another host's: what is here says itself
    what is free, of a CPU elsewhere the file says it, and where it does not, that is taken to be like this one."""
    text = PHASES.replace("devices = 3", "devices = 3\nmemory_gb = 64")
    found, gpus = shares(file, text, Gpus(("H20",), (90 * GIB,), (96 * GIB,), fp8=True))
    assert [(one.attention, one.experts, one.memory, one.device) for one in found] == [
        (1, 0, 90 * GIB, "cuda"), (1, 0, 4 * GIB, "cpu"), (0, 3, 64 * 10**9, "cpu"),
    ]  # fmt: skip
    assert gpus is not None and gpus.fp8 and gpus.free == (90 * GIB,)
    found, _ = shares(file, PHASES, Gpus(("H20",), (90 * GIB,), (96 * GIB,)))
    assert (found[2].memory, found[2].place) == (0, ""), (
        "the controller's own is a guess, and refuses nothing"
    )
    less = PHASES.replace('"h20"', '"h20"\nmemory_gb = 10')
    found, _ = shares(file, less, Gpus(("H20",), (90 * GIB,), (96 * GIB,)))
    assert found[0].memory == 10 * 10**9, "no more than the file says"

    def kv(memories: tuple[Share, ...]) -> int:
        wishes = Wishes(2, 3, prefill=1, decode=1, prefill_device="cuda", hosts=HOSTS, memories=memories)
        long = replace(NANO, max_position=1 << 20)
        return choose(long, ModelSource("", "nano"), Machine(2, 4 * GIB, 8 * GIB), wishes).attention.kv

    nodes = 0.9 * 4 * GIB - kv(found) / 0.5
    assert 0 < nodes < 2 * GIB, "half of what the CPU's weights leave, which is less than the GPU has"
    small, half = (kv((replace(found[0], memory=GIB, device=kind), *found[1:])) for kind in ("cuda", "cpu"))
    assert small == pytest.approx(1.6 * half, rel=0.01) and small < kv(found), "four fifths of a GPU's"
    given = kv((replace(found[0], memory=GIB, device="cpu", own=True), *found[1:]))
    assert given == small, "and of a CPU's host that the file gives its nodes"


def test_gpus_elsewhere_have_what_their_chip_has(file: Path) -> None:
    """One memory for each, whatever is here; older chips multiply no FP8."""
    text = TEXT.replace('role = "experts"\nhardware = "cpu-host"', 'role = "experts"\nhardware = "{}"')
    found, gpus = shares(file, text.format("h200_sxm"))
    assert found[0] == Share(2, 0, True, 4 * GIB, "", "cpu") and len(found) == 4
    place = "the h200_sxm of there, by configs/hardware/h200.toml"
    assert set(found[1:]) == {Share(0, 1, False, int(150.75e9), place, "cuda")}
    older = shares(file, text.format("a100"))[1]
    assert gpus is not None and gpus.fp8 and older is not None and not older.fp8
    with pytest.raises(ConfigError) as caught:
        shares(file, text.format("h20o"))
    said = caught.value.message
    assert said.startswith(
        f"--cluster {file}: host there: hardware 'h20o' is none of configs/hardware (did you mean"
    )
    assert "h20" in said and said.endswith("write memory_gb = N, 10^9 bytes of each GPU")
    named, _ = shares(file, text.format("h20o").replace("devices = 3", "devices = 3\nmemory_gb = 24.5"))
    assert named[1].memory == int(24.5e9)


def test_hosts_of_gpus_have_memory_of_their_own(file: Path) -> None:
    """Of hosts elsewhere the file says it, or nobody; of this one what is free."""

    def own(elsewhere: str, more: str) -> list[Share]:
        text = TEXT.replace(
            'role = "experts"\nhardware = "cpu-host"', f'role = "experts"\nhardware = "{elsewhere}"'
        )
        text = text.replace("devices = 3", f"devices = 3\n{more}")
        here = assigned(file, text)
        return list(with_own_memory(read_cluster(file), here, Machine(2, 4 * GIB, 8 * GIB)))

    mine, nobody = Share(2, 0, True, 4 * GIB, ""), Share(0, 3, False, 0, "there")
    assert own("h200", "") == own("h200", "memory_gb = 140") == [mine, nobody]
    assert own("h200", "host_memory_gb = 512") == [mine, replace(nobody, memory=512 * 10**9)]
    assert own("cpu-host", "memory_gb = 512") == [mine, replace(nobody, memory=512 * 10**9)]
    with pytest.raises(ConfigError, match=r"host 1\.host_memory_gb: cpu-host is a CPU; write memory_gb"):
        own("cpu-host", "host_memory_gb = 512")


def test_what_does_not_fit_elsewhere_is_named(file: Path) -> None:
    text = TEXT.replace("devices = 3", "devices = 3\nmemory_gb = 0.5")
    found, _ = shares(file, text)
    source, wishes = ModelSource("", "nano"), Wishes(2, 3, hosts=HOSTS, memories=found)
    with pytest.raises(
        DoesNotFitError, match="nano does not fit on the cpu-host of there, by memory_gb of the file"
    ):
        choose(NANO, source, Machine(2, 4 * GIB, 8 * GIB), wishes)


@pytest.mark.parametrize(
    ("prefill", "said"),
    [("", "the attention nodes of one run"), ("prefill = 2", "2 of 2 nodes: some have to decode")],
)
def test_other_attention_nodes_have_one_kind_of_device(file: Path, prefill: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assigned(file, PHASES.replace("prefill = 1", prefill))


def test_one_phase_has_one_kind_of_device(file: Path) -> None:
    text = PHASES.replace("nodes = 2", "nodes = 3").replace("prefill = 1", "prefill = 2")
    text = text.replace('"localhost"\nrole = "attention"\nhardware = "cpu-host"\ndevices = 1',
                        '"localhost"\nrole = "attention"\nhardware = "cpu-host"\ndevices = 2')  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"localhost is a cpu-host, 10\.0\.0\.1 a h20; the prefill nodes of one run"
    ):
        assigned(file, text)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_int8_experts_are_on_the_experts_device(where: str) -> None:
    folder = CONFIGS / "nano"
    source, spec = ModelSource(str(folder), "nano"), load_spec(folder)
    machine = Machine(cores=8, memory=64 << 30, memory_total=64 << 30)
    mixed = Wishes(
        1, 1, engine=EngineSettings(device="cuda", expert_dtype="int8"), expert_device=where,
        hosts=(Share(1, 0), Share(0, 1, here=False)),
    )  # fmt: skip
    assert choose(spec, source, machine, mixed).deployment.engine.expert_dtype == "int8"
    half = replace(source, dtype="float16")
    if where == "cuda":
        assert choose(spec, half, machine, mixed).deployment.engine.expert_dtype == "int8"
        return
    with pytest.raises(ConfigError, match="int8: multiplies bfloat16 or float32 rows on CPUs, not float16"):
        choose(spec, half, machine, mixed)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("10.0.0.1:77", ("10.0.0.1", 77)), ("[fd00::1]:5", ("fd00::1", 5)), ("fd00::1", ("fd00::1", 0))],
)
def test_listen(file: Path, listen: str, expected: tuple[str, int]) -> None:
    hosted = assigned(file, listen=listen)
    assert (hosted.listen, hosted.port) == expected


@pytest.mark.parametrize(
    ("text", "listen", "said"),
    [
        (TEXT, "10.9.9.9", "--listen 10.9.9.9: not an address of this machine"),
        (TEXT, "10.0.0.1:x", "--listen 10.0.0.1:x: is not ADDRESS or ADDRESS:PORT"),
        (TEXT, "10.0.0.1:70000", "is not ADDRESS or ADDRESS:PORT"),
        (TEXT, "127.0.0.1", "--listen 127.0.0.1: other hosts cannot reach it"),
        (TEXT.replace('"there"', '"localhost"'), "10.0.0.1", "--listen 10.0.0.1: every host of"),
        (TEXT.replace("10.0.0.1", "127.0.0.1"), None, "say where to listen for them with --listen ADDRESS"),
    ],
)
def test_where_nobody_could_join_is_refused(file: Path, text: str, listen: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assigned(file, text, listen)
    assert said in caught.value.message


def test_an_unknown_name_is_refused(file: Path) -> None:
    def nobody(name: str) -> frozenset[str]:
        raise OSError(-2, "Name or service not known")

    file.write_text(TEXT)
    with pytest.raises(ConfigError, match=r"host .*: cannot be looked up: Name or service not known"):
        assign(read_cluster(file), None, nobody, OWN)


def test_this_machine_knows_itself() -> None:
    assert "127.0.0.1" in own_addresses() & look_up("127.0.0.1")


def test_memory_is_counted_by_host() -> None:
    """Two nodes that do not fit on one machine fit on two; another host's memory is its own affair."""
    source = ModelSource(str(CONFIGS / "nano"), "nano")
    small = Machine(2, 700 << 20, 1 << 30)
    spec = load_spec(CONFIGS / "nano")
    with pytest.raises(DoesNotFitError):
        choose(spec, source, small, Wishes(1, 8))
    apart = Wishes(1, 8, "2", batch=4096, hosts=(Share(1, 0), Share(0, 8, here=False)))
    chosen = choose(spec, source, small, apart)
    assert chosen.deployment.count(Role.EXPERT) == 8
    assert (chosen.deployment.engine.max_sequences, chosen.deployment.engine.max_batch_tokens) == (4096, 2048)


PHASED = TEXT.replace("batch = 64", "batch = 64\nprefill = 1\nprefill_tokens = 1024").replace(
    "nodes = 3", "nodes = 3\nprompt_share = 0.25"
)


def asked(file: Path, given: frozenset[str] = frozenset(), **wishes: int | None) -> UpFlags:
    source = ModelSource(str(CONFIGS / "nano"), "nano")
    return UpFlags(
        RunSettings(cluster=file),
        source,
        Wishes(**wishes),
        Listening(),
        ServerSettings(),
        given=given,
    )


def test_a_file_may_say_which_nodes_compute_prompts(file: Path) -> None:
    """And what is started is that."""
    file.write_text(PHASED.replace("10.0.0.1", "127.0.0.1").replace('"there"', '"127.0.0.1"'))
    cluster = read_cluster(file)
    assert (cluster.prefill, cluster.decode_nodes, cluster.prefill_tokens, cluster.prompt_share) == (
        1,
        1,
        1024,
        0.25,
    )
    flags, _ = assigned_by(asked(file), cluster, Gpus())
    chosen = choose(
        load_spec(CONFIGS / "nano"), flags.source, Machine(2, 8 << 30, 8 << 30), flags.wishes
    ).deployment
    assert chosen.phases == {0: AttentionPhase.PREFILL, 1: AttentionPhase.DECODE}
    assert (chosen.engine.prefill_tokens, chosen.engine.prompt_share) == (1024, 0.25)
    with pytest.raises(
        ConfigError, match=r"--prefill 2: .* has attention.prefill = 1; drop the flag or edit the file"
    ):
        assigned_by(asked(file, frozenset({"prefill"}), prefill=2), cluster, Gpus())


def test_what_a_file_says_of_phases_is_rendered(file: Path) -> None:
    file.write_text(PHASED)
    words = " ".join(layout_of(read_cluster(file), Sizes(cpus=2, memory=3)).counts())
    assert "--prefill 1 --decode 1 --prefill-tokens 1024 --experts 3 --prompt-share 0.25" in words
    assert "--attention" not in words


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("prefill = 1\n", "prefill = 2\n", "attention.prefill: 2 of 2 nodes: some have to decode"),
        ("prefill = 1\n", "prefill = 0\n", "attention.prefill: 0 is outside"),
        (
            "prompt_share = 0.25",
            "prompt_share = 0.95",
            "experts.prompt_share: 0.95 is not a number from 0.01 to 0.9",
        ),
        ("prefill_tokens = 1024", "prefill_tokens = 0", "attention.prefill_tokens: 0 is outside"),
    ],
)
def test_phases_that_cannot_be_are_refused(file: Path, old: str, new: str, said: str) -> None:
    file.write_text(PHASED.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_cluster(file)
    assert said in caught.value.message
