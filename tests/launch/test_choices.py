"""What is chosen for a machine and what is said about it: topology, models, machine, banner. Values only."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from afserve.cli.main import run
from afserve.cli.up import asked_of, up
from afserve.config import EngineSettings, ModelSource
from afserve.control.wire import control_pb2 as pb
from afserve.control.wire.fields import put_settings
from afserve.errors import AfserveError, ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.drafting import planned_spec
from afserve.launch.plan.footprint import needs
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.models import CONFIGS, find_model, shapes
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Share, Wishes
from afserve.launch.run.banner import StartedModel, banner, examples, ranges
from afserve.launch.run.planned_run import plan_here
from afserve.member import Role
from afserve.placement.node_room import NODE_OVERHEAD
from afserve.quantization import Quantization

GIB = 1 << 30
NANO = load_spec(CONFIGS / "nano")
SOURCE = ModelSource(str(CONFIGS / "nano"), "nano")


def machine(cores=2, memory=8.0):
    return Machine(cores, int(memory * GIB), int(2 * memory * GIB))


@given(
    st.integers(1, 256),
    st.floats(0.1, 2000),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(1, 40),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_machine_gets_something_that_fits_or_a_reason(cores, memory, attention, experts, colocated):
    here = machine(cores, memory)
    try:
        chosen = choose(NANO, SOURCE, here, Wishes(attention, experts, colocated=colocated))
    except AfserveError as error:
        assert error.exit_code == 2
        return
    deployment = chosen.deployment
    found = deployment.count(Role.ATTENTION), deployment.count(Role.EXPERT)
    total = found[0] * chosen.attention.total + found[1] * (chosen.expert.total if chosen.expert else 0)
    assert total <= here.memory
    assert deployment.engine.max_model_len <= chosen.kv_tokens_of_node
    assert found == (attention or found[0], 0 if colocated else experts or found[1])
    assert deployment.placement.nodes == max(1, found[1])
    assert all(why for why in chosen.picked.values())


def test_what_the_user_fixed_is_not_explained():
    fixed = {"kv_tokens": 1600, "max_model_len": 200, "threads": 1, "spare_slots": 2}
    wishes = Wishes(1, 2, "3", engine=EngineSettings(draft="off"), **fixed)
    chosen = choose(NANO, SOURCE, machine(), wishes)
    assert chosen.picked == {}
    assert (
        chosen.deployment.engine.micro_batches,
        chosen.kv_tokens_of_node,
        chosen.deployment.engine.adaptive,
    ) == (
        3,
        1600,
        False,
    )


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (Wishes(micro_batches="5"), "--micro-batches: 5 is outside"),
        (Wishes(micro_batches="many"), "neither a number nor auto"),
        (Wishes(experts=33), "33 nodes, but the model has 32 experts"),
        (Wishes(experts=2, colocated=True), "--colocated"),
        (Wishes(attention=0), "--attention: 0 is outside"),
        (Wishes(max_model_len=1 << 20), "--max-model-len"),
        (Wishes(kv_tokens=64, max_model_len=100), "--kv-tokens: 64"),
        (Wishes(kv_tokens=65, max_model_len=100), "--kv-tokens: 65"),
        (Wishes(kv_tokens=3), "--kv-tokens: 3 is less than a block of 16 tokens"),
        (Wishes(kv_tokens=-1), "--kv-tokens: -1 is less than a block of 16 tokens"),
        (Wishes(threads=0), "--threads: 0"),
        (
            Wishes(colocated=True, engine=EngineSettings(wire_dtype="fp8")),
            "--wire-dtype fp8: a colocated run sends no rows",
        ),
        (
            Wishes(colocated=True, engine=EngineSettings(prompt_share=0.2)),
            "--prompt-share: expert nodes share their time so, a colocated run has none",
        ),
        (
            lambda: Wishes(engine=EngineSettings(expert_dtype="int3")),
            "--expert-dtype: 'int3' is not one of auto, int8, int4",
        ),
        (
            Wishes(engine=EngineSettings(dense_dtype="int4", device="cuda")),
            "--dense-dtype int4: only CPUs keep them so, not --device cuda",
        ),
        (
            Wishes(engine=EngineSettings(dense_dtype="fp8")),
            "--dense-dtype fp8: only GPUs multiply linear maps in FP8 blocks, not --device cpu",
        ),
        (
            Wishes(engine=EngineSettings(dense_dtype="fp8", device="cuda")),
            "--dense-dtype fp8: config.json has no FP8 blocks of 128 x 128",
        ),
        (
            Wishes(
                engine=EngineSettings(kv_dtype="fp8", device="cuda"),
                gpus=Gpus(("A100",), (1 << 36,), (1 << 36,), fp8=False),
            ),
            "--kv-dtype fp8: the GPUs here have no FP8 conversions (compute capability 8.9 or newer); use int8",
        ),
        (
            lambda: Wishes(engine=EngineSettings(wire_dtype="int8")),
            "--wire-dtype: 'int8' is not one of auto, fp8",
        ),
        (lambda: Wishes(engine=EngineSettings(max_waiting=0)), "--max-waiting: 0 is outside [1, 1048576]"),
        (lambda: Wishes(engine=EngineSettings(block_size=4097)), "--block-size: 4097 is outside [1, 4096]"),
    ],
)
def test_a_bad_wish_is_named(wishes, said):
    with pytest.raises(ConfigError) as refused:
        choose(NANO, SOURCE, machine(), wishes if isinstance(wishes, Wishes) else wishes())
    assert said in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("device", "asked", "wanted"), [("cpu", None, 512), ("cuda", None, 2048), ("cuda", 100, 100)]
)
def test_a_step_has_more_tokens_on_gpus_unless_the_user_says(device, asked, wanted):
    gpus = Gpus(("H200",) * 3, (1 << 36,) * 3, (1 << 36,) * 3) if device == "cuda" else None
    engine = EngineSettings(device=device, max_batch_tokens=asked)
    chosen = choose(NANO, SOURCE, machine(), Wishes(1, 2, engine=engine, gpus=gpus))
    assert chosen.deployment.engine.max_batch_tokens == wanted
    assert ("max-batch-tokens" in chosen.picked) is (wanted == 2048)


def test_what_only_nodes_of_a_phase_use_is_said_where_none_has_one():
    engine = EngineSettings(prefill_tokens=700, decode_prompt_tokens=64)
    picked = choose(NANO, SOURCE, machine(), Wishes(1, 2, engine=engine)).picked
    assert (
        picked["prefill-tokens"].startswith("700, of no node yet") and "--prefill" in picked["prefill-tokens"]
    )
    assert picked["decode-prompt-tokens"].startswith("64, of no node yet")
    phases = choose(NANO, SOURCE, machine(), Wishes(prefill=1, decode=1, experts=2, engine=engine)).picked
    assert not phases.keys() & {"prefill-tokens", "decode-prompt-tokens"}
    assert not choose(NANO, SOURCE, machine(), Wishes(1, 2)).picked.keys() & {"prefill-tokens"}


@pytest.mark.parametrize(
    ("cores", "wishes", "shares"),
    [
        (2, Wishes(1, 1), True),
        (3, Wishes(1, 1), True),
        (1, Wishes(1, 1), False),  # there is no second core
        (4, Wishes(1, 1), False),  # two threads each
        (64, Wishes(1, 1, threads=1), False),  # nobody wants for a core
        (2, Wishes(1, 1, threads=2), False),
        (2, Wishes(1, 2), False),
        (2, Wishes(2, 1), False),
        (2, Wishes(1, colocated=True), False),
        (2, Wishes(1, 1, hosts=(Share(1, 0), Share(0, 1))), False),
        (2, Wishes(1, 1, engine=EngineSettings(share_cores=False)), False),
        (64, Wishes(1, 1, threads=1, engine=EngineSettings(share_cores=True)), True),
    ],
)
def test_cores_are_lent_where_two_nodes_have_no_others(cores, wishes, shares):
    chosen = choose(NANO, SOURCE, machine(cores), wishes)
    assert chosen.deployment.engine.share_cores is shares
    assert ("share-cores" in chosen.picked) is (shares and wishes.engine.share_cores is None)


def test_cores_that_nobody_can_lend_are_said():
    asked = Wishes(1, 2, engine=EngineSettings(share_cores=True))
    assert choose(NANO, SOURCE, machine(), asked).picked["share-cores"].startswith("asked for, but only")


def test_settings_reach_the_engine():
    asked = Wishes(
        1,
        2,
        engine=EngineSettings(
            max_waiting=7, block_size=48, prefix_caching=False, expert_dtype="int8", wire_dtype="fp8"
        ),
    )
    engine = choose(NANO, SOURCE, machine(), asked).deployment.engine
    assert (engine.max_waiting, engine.block_size, engine.prefix_caching) == (7, 48, False)
    assert (engine.expert_dtype, engine.wire_dtype) == ("int8", "fp8")
    assert engine.kv_blocks * 48 >= engine.max_model_len


def test_dense_weights_take_their_bits_and_embeddings_do_not():
    whole, eight, four = (
        choose(NANO, SOURCE, machine(), Wishes(1, 2, engine=EngineSettings(dense_dtype=d))).attention.weights
        for d in ("auto", "int8", "int4")
    )
    kept = 2 * NANO.vocab_size * NANO.hidden  # the embeddings, in 16 bits
    maps = NANO.attention_parameters() - (0 if NANO.tied else NANO.vocab_size * NANO.hidden)
    assert whole == 2 * NANO.attention_parameters()
    assert eight == kept + maps and four == kept + int(maps * 4.5 / 8)


def test_int8_experts_take_a_byte_and_a_scale_per_output():
    plain, bytes_each = (
        choose(NANO, SOURCE, machine(), Wishes(1, 2, spare_slots=0, engine=EngineSettings(expert_dtype=d)))
        for d in ("auto", "int8")
    )
    assert plain.expert is not None and bytes_each.expert is not None
    slots = NANO.moe_layers * -(-NANO.experts // 2)
    assert plain.expert.weights == slots * NANO.expert_parameters() * 2
    scales = 4 * (2 * NANO.moe.inner + NANO.hidden)
    assert bytes_each.expert.weights == slots * (NANO.expert_parameters() + scales)
    assert plain.attention.weights == bytes_each.attention.weights
    half = ModelSource(SOURCE.path, SOURCE.name, dtype="float16")
    with pytest.raises(
        ConfigError, match="--expert-dtype int8: multiplies bfloat16 or float32 rows on CPUs, not float16"
    ):
        choose(NANO, half, machine(), Wishes(engine=EngineSettings(expert_dtype="int8")))


def test_int4_experts_take_four_and_a_half_bits():
    asked = Wishes(1, 2, spare_slots=0, engine=EngineSettings(expert_dtype="int4"))
    chosen = choose(NANO, SOURCE, machine(), asked)
    assert chosen.expert is not None
    slots = NANO.moe_layers * -(-NANO.experts // 2)
    assert chosen.expert.weights == slots * NANO.expert_parameters() * 9 // 16


def test_experts_that_a_checkpoint_has_in_int4_stay_so():
    few = replace(NANO, quantization=Quantization("gptq", 4, 128))
    ordered = replace(NANO, quantization=Quantization("gptq", 4, 128, ordered=True))
    slots = NANO.moe_layers * -(-NANO.experts // 2)
    for spec, bits in ((few, 4.25), (ordered, 16)):
        chosen = choose(spec, SOURCE, machine(), Wishes(1, 2, spare_slots=0))
        assert chosen.expert is not None
        assert chosen.expert.weights == slots * NANO.expert_parameters() * bits / 8


def test_a_model_fits_in_8_bits_where_it_does_not_in_16(tmp_path: Path):
    found = find_model("qwen3-30b-a3b", tmp_path)
    spec, source = (
        load_spec(found.folder),
        ModelSource(str(found.folder), found.name, load_format="dummy"),
    )
    here = machine(memory=48)
    with pytest.raises(DoesNotFitError):
        choose(spec, source, here, Wishes(1, 1))
    chosen = choose(spec, source, here, Wishes(1, 1, engine=EngineSettings(expert_dtype="int8")))
    assert chosen.attention.total + chosen.expert.total <= here.memory
    eight = Wishes(engine=EngineSettings(expert_dtype="int8"))
    assert needs(spec, source, here, eight) != needs(spec, source, here, Wishes())


def test_many_nodes_are_given_longer_than_was_asked_and_it_is_said():
    here = machine(memory=4096)
    few, many = (choose(NANO, SOURCE, here, Wishes(count, 2, spare_slots=0)) for count in (2, 448))
    assert few.deployment.silence == Wishes().silence and "silence" not in few.picked
    assert many.deployment.silence == pytest.approx(1.5)
    assert "450 nodes" in many.picked["silence"]


def test_a_small_machine_shortens_what_it_can_and_says_so():
    chosen = choose(NANO, SOURCE, machine(memory=(2 * NODE_OVERHEAD / GIB + 0.012) / 0.9), Wishes())
    assert chosen.deployment.engine.max_model_len < NANO.max_position
    assert str(NANO.max_position) in chosen.picked["max-model-len"]


def test_too_large_a_cache_says_how_much_fits():
    here = machine(memory=(2 * NODE_OVERHEAD / GIB + 0.05) / 0.9)
    with pytest.raises(DoesNotFitError, match=r"--kv-tokens 1000000: .* at most [0-9]+ fit") as refused:
        choose(NANO, SOURCE, here, Wishes(kv_tokens=1000000, max_model_len=64))
    with pytest.raises(DoesNotFitError, match="--kv-tokens 99999999999999999: "):
        choose(NANO, SOURCE, here, Wishes(kv_tokens=99999999999999999, max_model_len=64))
    most = int(refused.value.message.split()[-2])
    assert choose(NANO, SOURCE, here, Wishes(kv_tokens=most, max_model_len=64)).deployment.engine.kv_blocks
    with pytest.raises(DoesNotFitError, match="at most"):
        choose(NANO, SOURCE, here, Wishes(kv_tokens=most + 16, max_model_len=64))


def test_what_does_not_fit_says_needs(tmp_path: Path):
    found = find_model("deepseek-v3", tmp_path)
    spec = load_spec(found.folder)
    source = ModelSource(str(found.folder), found.name, load_format="dummy")
    with pytest.raises(DoesNotFitError) as refused:
        choose(spec, source, machine(memory=512), Wishes())
    said = refused.value.message
    routed = spec.routed_parameters() * 2 / GIB
    assert f"{routed:,.0f} GiB over all expert nodes" in said and "per 1,000 tokens" in said
    assert "(58 MoE layers)" in said and "(1 MoE layer)" in needs(
        spec.cut(4), source, machine(memory=4), Wishes()
    )


COMMAND = re.compile(r"^  (afserve .+?)     (.+)", re.MULTILINE)


def proposed(arguments: Sequence[str], memory: float, scratch: Path) -> dict[str, str]:
    """The commands of the refusal of `afserve up` with these arguments, and what is said of each."""
    asked = asked_of(dict(up.make_context("up", list(arguments)).params))
    found = find_model(asked.run.model, scratch)
    with pytest.raises(DoesNotFitError) as refused:
        plan_here(asked, found, machine(memory=memory), Gpus())
    assert refused.value.param == "model"
    return dict(COMMAND.findall(refused.value.message))


@pytest.mark.parametrize("memory", [3, 16, 22.9, 64, 200, 512])
@pytest.mark.parametrize(
    "typed",
    [
        "--model deepseek-v3",
        "--model deepseek-v3 --load-format dummy",
        "--model deepseek-v3 --load-format dummy --layers 50",
        "--model kimi-k2 --expert-dtype int8",
        "--model deepseek-v3 --load-format dummy --colocated",
    ],
)
def test_a_command_that_is_proposed_fits(typed: str, memory: float, tmp_path: Path):
    commands = proposed(typed.split(), memory, tmp_path)
    name = typed.split()[1]
    assert "afserve up" in commands and f"afserve plan --model {name} --pool h20=64" in commands
    (random,) = [line for line in commands if "--load-format dummy" in line]
    arguments = random.split()[2:]
    asked = asked_of(dict(up.make_context("up", arguments).params))
    found = find_model(asked.run.model, tmp_path)
    if "on a larger machine" in commands[random]:
        assert memory <= 16
        return
    layers = plan_here(asked, found, machine(memory=memory), Gpus()).spec.layers
    assert layers >= 2, "a dense layer and one with experts"


@pytest.mark.slow
def test_a_plan_that_is_proposed_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for line in proposed(["--model", "deepseek-v3"], 8, tmp_path):
        if line.startswith("afserve plan"):
            arguments = line.replace("FILE", str(tmp_path / "cluster.toml")).split()[1:]
            assert run(arguments) == 0, capsys.readouterr().err
    assert (tmp_path / "cluster.toml").stat().st_size


def test_weights_that_are_not_here_can_be_fetched(tmp_path: Path):
    assert "afserve pull deepseek-ai/DeepSeek-V3" in proposed(["--model", "deepseek-v3"], 512, tmp_path)


@pytest.mark.parametrize("name", shapes())
def test_every_known_shape_is_found_or_refused_by_name(name, tmp_path: Path):
    try:
        found = find_model(name, tmp_path)
    except AfserveError as error:
        assert name in error.message
        return
    assert not found.weights
    assert load_spec(found.folder).experts > 1


@pytest.mark.parametrize("name", shapes())
def test_a_known_shape_has_as_many_parameters_as_its_card_says(name, tmp_path: Path):
    """A width or a count that was copied wrongly shows: cards round to two or three digits."""
    notes = tomllib.loads((CONFIGS / "models" / f"{name}.toml").read_text())["meta"]["notes"]
    said = re.match(r"([\d.]+)B, ", notes)
    try:
        spec = load_spec(find_model(name, tmp_path).folder)
    except AfserveError:
        return  # it is not served
    if said is not None:
        table = 0 if spec.table is None else spec.table.rows * spec.table.width
        billions = (spec.routed_parameters() + spec.attention_parameters() + table) / 1e9
        assert billions == pytest.approx(float(said[1]), rel=0.02)


def test_models_by_folder_alias_and_id(tmp_path: Path, monkeypatch):
    assert find_model("nano", tmp_path).weights
    assert find_model("deepseek-v3.1", tmp_path).name == "deepseek-v3"
    for wrong, said in (
        (str(tmp_path), "no config.json"),
        ("nonsense", "deepseek-v3"),
        ("some/model", "afserve pull"),
    ):
        with pytest.raises(ConfigError) as refused:
            find_model(wrong, tmp_path)
        assert said in refused.value.message
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert find_model("some/model", tmp_path).folder == snapshot


def cgroup(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_container_limits_count(tmp_path: Path):
    limits = {
        "cpu_dot_max": "100000 100000\n",
        "memory_dot_max": str(3 << 20),
        "memory_dot_current": str(2 << 20),
        "memory_dot_stat": f"anon 5\ninactive_file {1 << 20}\n",
    }
    here = this_machine(cgroup(tmp_path / "v2", **limits))
    assert (here.cores, here.memory, here.memory_total) == (1, 2 << 20, 3 << 20)
    assert "container memory limit" in here.limited_by
    old = {
        "cpu__cpu_dot_cfs_quota_us": "50000",
        "cpu__cpu_dot_cfs_period_us": "100000",
        "memory__memory_dot_limit_in_bytes": str(3 << 20),
        "memory__memory_dot_usage_in_bytes": str(1 << 20),
    }
    here = this_machine(cgroup(tmp_path / "v1", **old))
    assert (here.cores, here.memory) == (1, 2 << 20)


def test_without_limits_the_machine_is_the_limit(tmp_path: Path):
    free = this_machine(
        cgroup(tmp_path, cpu_dot_max="max 100000", memory_dot_max="max", memory_dot_current="5")
    )
    assert free.limited_by == "" and free.memory <= free.memory_total


def drawn(topology, expert_error=None, dense_error=None, isas=None, **more) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(
            banner(
                [StartedModel(topology, "nano", expert_error, dense_error, isas or {})],
                "http://127.0.0.1:8000",
                1.5,
                **more,
            )
        )
    return console.export_text()


def test_the_banner_says_who_prefills_and_who_decodes():
    text = drawn(choose(NANO, SOURCE, machine(), Wishes(prefill=1, decode=2, experts=1)))
    for title in ("attention-0, prefill ", "attention-1, decode ", "attention-2, decode ", "expert-0 "):
        assert title in text
    assert "attention-0 ─" in drawn(choose(NANO, SOURCE, machine(), Wishes(1, 1)))


def test_the_banner_tells_what_rounding_lost():
    four = Wishes(1, 2, engine=EngineSettings(expert_dtype="int4"))
    text = drawn(choose(NANO, SOURCE, machine(), four), expert_error=0.0861)
    assert "int4 weights" in text and "expert weights: rounded to int4, relative error 0.086" in text


def test_the_banner_tells_what_rounding_dense_weights_lost():
    eight = Wishes(1, 2, engine=EngineSettings(dense_dtype="int8"))
    text = drawn(choose(NANO, SOURCE, machine(), eight), dense_error=0.0071)
    assert "dense weights: rounded to int8, relative error 0.0071" in text and "expert weights" not in text


def test_the_banner_names_the_instructions_and_who_differs():
    topology = choose(NANO, SOURCE, machine(), Wishes(1, 2))
    alike = dict.fromkeys(("attention-0", "expert-0", "expert-1"), "avx2")
    assert "instructions: avx2\n" in "\n".join(
        line.rstrip() for line in drawn(topology, isas=alike).splitlines()
    )
    text = " ".join(drawn(topology, isas=alike | {"expert-1": "amx"}).split())
    assert (
        "instructions differ: amx on expert-1; avx2 on attention-0, expert-0. Tokens have the same bits"
        in text
    )
    assert "instructions" not in drawn(topology)


def test_the_banner_shows_who_has_what():
    text = drawn(choose(NANO, SOURCE, machine(), Wishes(attention=6, experts=3, micro_batches="2")))
    for wanted in (
        "attention-0",
        "attention-3",
        "and 2 more",
        "experts 0-10",
        "experts 22-31",
        "m = 2",
        "curl",
    ):
        assert wanted in text, wanted
    text = drawn(choose(NANO, SOURCE, machine(), Wishes(colocated=True)))
    assert "colocated" in text and "expert-0" not in text
    text = drawn(
        choose(
            NANO,
            SOURCE,
            machine(),
            Wishes(1, 1, engine=EngineSettings(expert_dtype="int8", wire_dtype="fp8")),
        )
    )
    assert "int8 weights" in text and "rows in fp8" in text
    assert "in int8" in drawn(
        choose(NANO, SOURCE, machine(), Wishes(colocated=True, engine=EngineSettings(expert_dtype="int8")))
    )


def test_the_examples_can_be_copied():
    chat, curl, body = examples("http://127.0.0.1:65535")
    assert chat == "afserve chat --url http://127.0.0.1:65535"
    assert curl.endswith(" \\") and json.loads(body.split(" -d '")[1].rstrip("'"))["prompt"]
    assert len(chat) < 80 and len(curl) < 80
    assert examples("http://127.0.0.1:8000")[0] == "afserve chat"


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


def test_fp8_counts_as_sixteen_bits():
    fp8 = replace(NANO, dtype="float8_e4m3fn")
    both = [choose(spec, SOURCE, machine(), Wishes()).attention.weights for spec in (NANO, fp8)]
    assert both[0] == both[1]


def test_phases_are_of_attention_nodes_by_index():
    chosen = choose(NANO, SOURCE, machine(), Wishes(prefill=1, decode=2, experts=1))
    assert chosen.deployment.count(Role.ATTENTION) == 3
    assert chosen.deployment.phases == {0: "prefill", 1: "decode", 2: "decode"}
    assert chosen.deployment.phase(7) == "both"
    assert choose(NANO, SOURCE, machine(), Wishes(2, 1)).deployment.phases == {}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefill": 1}, "--prefill: .* add --decode or use --attention"),
        ({"decode": 1}, "--decode: .* add --prefill"),
        ({"prefill": 1, "decode": 0}, "--decode: 0 is outside"),
        ({"prefill": 1, "decode": 2, "attention": 2}, "make 3; leave --attention out"),
        ({"prefill": 1, "decode": 1, "engine": EngineSettings(prefix_caching=False)}, "--no-prefix-caching"),
    ],
)
def test_phases_that_cannot_serve_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        choose(NANO, SOURCE, machine(), Wishes(**fields))
    assert Wishes(prefill=1, decode=2, attention=3).attention == Wishes(prefill=1, decode=2).attention == 3


@pytest.mark.parametrize(
    ("settings", "draft", "said"),
    [
        ({"draft": "auto"}, "mtp", "mtp, as many tokens a step as pay, since this checkpoint has a layer"),
        ({"draft": "auto:2"}, "mtp:2", "mtp, 2 tokens a step, since"),
        ({"draft": "ngram:4"}, "ngram:4", "ngram, 4 tokens a step"),
        ({"draft": "off"}, "off", None),
        ({}, "suffix", "suffix, as many tokens a step as pay"),
        ({"device": "cuda"}, "", None),
        ({"speculative_config": '{"method": "suffix", "enforce_eager": true}'}, "", "suffix, as many"),
    ],
)
def test_who_drafts_is_decided_before_nodes_start_and_said(settings, draft, said):
    """At every node alike: it has the checkpoint's layer for it, or not."""
    engine = EngineSettings(**settings)
    spec = planned_spec(SOURCE, engine.drafts())
    found = choose(spec, SOURCE, machine(), Wishes(engine=engine))
    assert found.deployment.engine.draft == draft
    put_settings(found.deployment.engine, pb.EngineConfig())  # nodes are told it
    assert bool(spec.predictors) == found.deployment.engine.drafts().predicts
    assert found.picked.get("draft", "").startswith(said) if said else "draft" not in found.picked
    passed = "without effect here: enforce_eager" if "speculative_config" in settings else None
    assert found.picked.get("speculative-config") == passed
    shown = choose(NANO, SOURCE, machine(), Wishes(engine=EngineSettings(draft="auto")))
    assert shown.deployment.engine.draft == "suffix" and "has no layer of multi" in shown.picked["draft"]
