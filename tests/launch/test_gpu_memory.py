"""What experts take of GPUs: a checkpoint's FP8 is 8 bits of a weight there, its MXFP4 four and a quarter."""

from dataclasses import replace

import pytest

from afserve.cli.plan.catalog import load_curves, load_engine, load_hardware, load_model
from afserve.config import EngineSettings, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.kernels.devices import scratch
from afserve.launch.plan.bits import check_bits
from afserve.launch.plan.cluster import read_cluster
from afserve.launch.plan.footprint import kept_dense, kept_dtype, kernel_bytes, role_bytes
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.host_memory import memories
from afserve.launch.plan.hosts import assign
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import find_model
from afserve.launch.plan.node_memory import node_weights
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import RunSettings, Share, Wishes
from afserve.launch.sites.awaited import awaiting
from afserve.placement.node_room import NODE_OVERHEAD
from afserve.placement.planner.cluster_file import cluster_toml
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.kv import attention_weight_bytes
from afserve.placement.planner.perf.kv import kernel_bytes as planned_bytes
from afserve.placement.planner.perf.room import cache_room
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.workload import fixed_context
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.search import DevicePool, GivenLayout
from afserve.quantization import Quantization
from afserve.spec_parts import CLAMPED_SWIGLU

H200 = Gpus(("H200",), (141 << 30,), (141 << 30,))
A100 = Gpus(("A100",), (80 << 30,), (80 << 30,), fp8=False)
FP8 = (128, 128)


def kept(spec, device="cuda", gpus=H200, **asked):
    source, wishes = (
        ModelSource("/a/folder", "a model"),
        Wishes(engine=EngineSettings(device=device, **asked), gpus=gpus),
    )
    kind = kept_dtype(spec, source, wishes)
    return kind, 8 * role_bytes(spec, source, kind)[1] / spec.routed_parameters()


def with_clamped_experts(kind):
    return kind if kind.moe is None else replace(kind, ffn=replace(kind.moe, activation=CLAMPED_SWIGLU))


def spec_of(name, folder, block=None):
    return replace(load_spec(find_model(name, folder).folder), fp8_block=block)


@pytest.mark.parametrize(
    ("name", "gb"),
    [("deepseek-v3", 654), ("qwen3-235b-a22b", 227), ("glm-4.5", 336)],
)
def test_fp8_checkpoints_are_8_bits_where_they_are_multiplied(tmp_path, name, gb):
    spec = spec_of(name, tmp_path, FP8)
    kind, bits = kept(spec)
    assert kind == "fp8" and bits == pytest.approx(8.002, abs=0.001)
    assert spec.routed_parameters() * bits / 8e9 == pytest.approx(gb, rel=0.01)
    assert kept(spec, gpus=A100) == ("auto", 16.0), "no FP8 before 8.9: de-quantised at load"
    on_cpu = kept(replace(spec, dtype="bfloat16"), device="cpu", gpus=None)
    assert on_cpu == ("native fp8", pytest.approx(8.0625)), (
        "a cache line of scales for 128 inputs of 64 outputs"
    )
    assert kept(replace(spec, dtype="float32"), device="cpu", gpus=None) == ("auto", 32.0)
    clamped = replace(spec, kinds=tuple(map(with_clamped_experts, spec.kinds)))
    assert kept(clamped) == ("auto", 16.0), "blocks are multiplied by a plain SwiGLU alone"
    assert kept(spec, expert_dtype="int4")[0] == "int4"
    assert kept(replace(spec, fp8_block=None)) == ("auto", 16.0)
    assert kept(replace(spec, fp8_block=(64, 128))) == ("auto", 16.0), "other blocks are de-quantised"


def test_linear_maps_stay_fp8_where_gpus_multiply_it(tmp_path):
    """Half of what an attention node has of 16 bits, but for its ends, and what MLA multiplies head by head."""
    spec, source = spec_of("deepseek-v3", tmp_path, FP8), ModelSource("/a/folder", "a model")

    def wishes(gpus=H200, **asked):
        return Wishes(engine=EngineSettings(device="cuda", **asked), gpus=gpus)

    assert kept_dense(spec, source, wishes()) == kept_dense(spec, source, wishes(dense_dtype="fp8")) == "fp8"
    eight, sixteen = (role_bytes(spec, source, "fp8", kind)[0] for kind in ("fp8", "auto"))
    assert (eight / 1e9, sixteen / 1e9) == (pytest.approx(20.1, abs=0.05), pytest.approx(34.2, abs=0.05))
    wide = replace(source, dtype="float32")
    for kind, rows, gpus in (
        (replace(spec, fp8_block=None), source, H200),
        (spec, wide, H200),
        (spec, source, A100),
    ):
        assert kept_dense(kind, rows, wishes(gpus)) == "auto"
        with pytest.raises(ConfigError, match=r"--dense-dtype fp8: (config.json|float32 rows|the GPUs here)"):
            check_bits(kind, rows, wishes(gpus, dense_dtype="fp8"))
    assert kept_dense(spec, source, Wishes()) == "auto", "CPUs de-quantise them"
    assert (
        role_bytes(spec, source, "fp8", kept_dense(spec, source, wishes(dense_dtype="model")))[0] == sixteen
    )
    check_bits(spec, source, wishes(A100, dense_dtype="model"))


@pytest.mark.parametrize(
    ("name", "apart"), [("deepseek-v3", 0.06), ("qwen3-235b-a22b", 0.01), ("glm-4.5", 0.01)]
)
def test_plan_and_up_count_alike(tmp_path, name, apart):
    """An attention node's weights of an FP8 checkpoint. A plan has in FP8 what MLA multiplies head by head, too."""
    own = role_bytes(spec_of(name, tmp_path, FP8), ModelSource("/a/folder", name), "fp8", "fp8")[0]
    assert (1 - apart) * own < attention_weight_bytes(load_model(name), Precision("fp8"), 1) < own


def test_mxfp4_has_scales_of_a_byte_on_gpus(tmp_path):
    how = Quantization("mxfp4", 4, 32)
    spec = replace(spec_of("gpt-oss-120b", tmp_path), quantization=how)
    kind, bits = kept(spec)
    assert kind == "mxfp4" and bits == pytest.approx(4.25)
    assert spec.routed_parameters() * bits / 8e9 == pytest.approx(61, rel=0.01)
    assert kept(spec, device="cpu", gpus=None) == ("stored", pytest.approx(4.5)), "bfloat16 numbers on a CPU"


CARDS = {
    "H100": 80,
    "H200": 141,
    "B200": 180,
}  # 10^9 bytes, of which a context and the driver take half of one
MODELS = ("deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "glm-4.5", "gpt-oss-120b", "qwen3-30b-a3b")


def stored(name, folder):
    """FP8 checkpoints but for gpt-oss's MXFP4 and Qwen3-30B in 16 bits."""
    spec = spec_of(name, folder, None if name in ("gpt-oss-120b", "qwen3-30b-a3b") else FP8)
    return replace(spec, quantization=Quantization("mxfp4", 4, 32)) if name == "gpt-oss-120b" else spec


def chosen(spec, name, wishes, machine):
    """None where it does not fit."""
    try:
        return choose(spec, ModelSource("/a/folder", name), machine, wishes)
    except DoesNotFitError:
        return None


def on_cards(name, card, folder, experts=4):
    """Eight cards of this machine."""
    size = int((CARDS[card] - 0.5) * 1e9)
    gpus = Gpus((card,) * 8, (size,) * 8, (size,) * 8)
    wishes = Wishes(engine=EngineSettings(device="cuda"), gpus=gpus, attention=8 - experts, experts=experts)
    return chosen(stored(name, folder), name, wishes, Machine(64, 1 << 40, 1 << 40, "")), size


FILE = """
micro_batches = 2
model.name = "a model"
attention = {nodes = 2, tensor_parallel = 1, batch = 256}
experts.nodes = 6
"""
LAPTOP = Machine(4, 8 << 30, 16 << 30)


def of_file(name, folder, text):
    """What `up` starts of a cluster file on hosts that are not this machine, which is a laptop."""
    file = folder / "cluster.toml"
    file.write_text(text)
    cluster = read_cluster(file, placeholders=True)
    resolve = {"10.0.0.9": frozenset({"10.0.0.9"})}
    assignment = assign(
        cluster, "10.0.0.9", lambda host: resolve.get(host, frozenset({"10.0.0.2"})), ["10.0.0.9"]
    )
    shares, gpus = memories(cluster, assignment, LAPTOP, Gpus())
    wishes = Wishes(
        cluster.attention, cluster.experts, engine=EngineSettings(device="cuda"), batch=cluster.batch,
        hosts=assignment.node_counts(), memories=shares, gpus=gpus,
    )  # fmt: skip
    return chosen(stored(name, folder), name, wishes, LAPTOP)


def hosts_of(card, gb=""):
    sides = (("attention", 2), ("experts", 6))
    return "".join(
        f'[[host]]\naddress = "{role}-0"\nrole = "{role}"\nhardware = "{card}"\ndevices = {count}\n{gb}\n'
        for role, count in sides
    )


@pytest.mark.parametrize("name", MODELS)
def test_up_fits_what_a_plan_fits(tmp_path, name):
    """The file that a plan writes is started on a laptop for hosts elsewhere; where there is no plan, one by hand is
    refused. A card has what the catalogue says, and the KV tokens of the plan are those that `up` keeps, but for what
    MLA multiplies head by head, which is planned in FP8, and what as many as are planned see in windows."""
    widths = {"gpt-oss-120b": ("bf16", "fp4"), "qwen3-30b-a3b": ("bf16", "bf16")}
    own = Precision(*widths.get(name, ("fp8", "fp8")), "bf16")
    setting = Setting(load_model(name), load_curves("h200"), fixed_context(4096), precision=own)
    fits = []
    for card in map(str.lower, CARDS):
        chip = load_hardware(card)
        layout = GivenLayout(attention_devices=2, expert_devices=6, tensor_parallel=1)
        engines = (("afd", load_engine("step-3")),)
        question = Question(
            setting,
            (DevicePool(chip, 8),),
            kinds=("afd",),
            layout=layout,
            micro_batches=(2,),
            engines=engines,
        )
        plans = answer(question.started()).plans
        text = cluster_toml(plans[0], name, {card: chip}) if plans else FILE + hosts_of(card)
        found = of_file(name, tmp_path, text)
        assert bool(plans) == (found is not None), card
        fits.append(found is not None)
        by_hand = of_file(name, tmp_path, FILE + hosts_of(card))
        if found is not None and by_hand is not None:
            assert (found.attention.kv, found.expert) == (by_hand.attention.kv, by_hand.expert)
            planned = float(cache_room(setting, chip, 1, 0.0, 4096).tokens)
            apart = abs(planned / found.kv_tokens_of_node - 1)
            assert apart < {"gpt-oss-120b": 0.03}.get(name, 0.0125), (planned, found.kv_tokens_of_node)
            assert plans[0].batch * plans[0].micro_batches * 4096 <= planned
    assert any(fits)


@pytest.mark.parametrize(
    ("name", "asked", "mib"),
    [
        ("deepseek-v3", {}, 256 + 288),  # keys and values of some heads, and latents of 262,144 tokens
        ("deepseek-v3", {"gpu_kernels": "flashinfer"}, 256 + 288 + 128),
        ("qwen3-30b-a3b", {"gpu_kernels": "flashinfer,fla"}, 128),
        ("qwen3-30b-a3b", {}, 0),
        ("deepseek-v3", {"device": "cpu"}, 0),
    ],
)
def test_what_kernels_take_beside_weights_and_caches_is_planned(tmp_path, name, asked, mib):
    """The same by `up` and by `plan`."""
    spec, source = spec_of(name, tmp_path, FP8), ModelSource("/a/folder", name)
    engine = EngineSettings(**{"device": "cuda"} | asked)
    wishes = Wishes(engine=engine, gpus=None if engine.device == "cpu" else H200, attention=1, experts=1)
    assert kernel_bytes(spec, source, wishes) == mib << 20
    assert node_weights(spec, source, wishes, Share(1, 1), spec.experts).kernels == mib << 20
    heads = [
        (a.heads, a.nope_dim + a.value_dim) for a in (one.attention for one in spec.kinds) if a.kind == "mla"
    ]
    assert all(scratch.LONGEST * each * 2 <= scratch.PROMPTS for _, each in heads), "one head's fit"
    if not asked:
        assert planned_bytes(load_model(name)) == mib << 20


def test_kv_gives_way_to_what_kernels_take(tmp_path, monkeypatch):
    """Four fifths of what is left."""
    found, _ = on_cards("deepseek-v3", "H200", tmp_path / "with", experts=6)
    monkeypatch.setattr(scratch, "of_prompts", lambda *_: 0)
    without, _ = on_cards("deepseek-v3", "H200", tmp_path / "without", experts=6)
    less = without.attention.kv - found.attention.kv
    assert (
        less == pytest.approx(0.8 * found.attention.kernels, rel=0.02)
        and found.attention.kernels == 544 << 20
    )
    assert found.attention.total == sum(
        (found.attention.weights, found.attention.kv, 544 << 20, NODE_OVERHEAD)
    )


@pytest.mark.parametrize(
    ("name", "thousands"),  # KV tokens of an attention node on each card, 0 where the model does not fit
    [
        ("deepseek-v3", (0, 1201, 1600)),
        ("kimi-k2", (0, 0, 0)),  # 1,015 GB in FP8, six cards have 1,077 at most and keep a tenth of it
        ("qwen3-235b-a22b", (257, 485, 631)),
        ("glm-4.5", (112, 228, 303)),
        ("gpt-oss-120b", (1247, 2306, 2983)),
        ("qwen3-30b-a3b", (555, 1001, 1287)),
    ],
)
def test_six_models_on_three_cards(tmp_path, name, thousands):
    """Two attention and six expert nodes: KV takes four fifths of what weights leave, in blocks of 64 tokens. The same
    on this machine's cards and, by a cluster file, on those of others."""
    for card, expected in zip(CARDS, thousands, strict=True):
        found, size = on_cards(name, card, tmp_path / card, experts=6)
        elsewhere = of_file(name, tmp_path, FILE + hosts_of("a card", f"memory_gb = {size / 1e9}"))
        assert (elsewhere is None) == (found is None)
        if found is not None:
            assert (elsewhere.attention, elsewhere.expert) == (found.attention, found.expert)
        assert (0 if found is None else found.kv_tokens_of_node // 1000) == expected, card
        if found is not None:
            assert found.deployment.engine.block_size == 64
            assert 0.5 * size < found.attention.total < 0.9 * size and found.expert.total < 0.9 * size


def test_awaited_nodes_have_what_was_said_of_them(tmp_path):
    """What does not fit is refused before anybody waits; without --node-memory nodes refuse for themselves."""
    spec, asked = stored("glm-4.5", tmp_path), Wishes(2, 6, engine=EngineSettings(device="cuda"))

    def found(gib):
        run = RunSettings(elsewhere=True, listen="10.0.0.9:7700", node_memory=gib)
        wishes, _, machine, _ = awaiting(run, asked, LAPTOP)
        return choose(spec, ModelSource("/a/folder", "glm-4.5"), machine, wishes)

    assert found(131.0).kv_tokens_of_node > 200_000
    with pytest.raises(DoesNotFitError, match=r"does not fit on 50 GiB \(--node-memory\)"):
        found(50.0)
