"""Tiny random checkpoints of every family, made once per run with transformers, which is also the oracle."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beside import Beside
from tests.by_day import leave_the_rest_to_the_night, make_none_of_the_night
from tests.examples import QUICK_EXAMPLES, draw_at_most, draw_by_day, draw_by_night, draw_few
from tests.warm.interpreter import TEXTS, WARM

draw_by_day()

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "num_key_value_heads": 4, "kv_lora_rank": 20,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16, "num_experts_per_tok": 3,
    "n_routed_experts": 12, "first_k_dense_replace": 1,
}  # fmt: skip

# name -> (transformers class, config fields)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": 28, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}),
    "v3-yarn-noq": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
         "rope_parameters": YARN, "norm_topk_prob": False, "routed_scaling_factor": 1.3},
    ),
    "v3-tied-half": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": 28, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
         "tie_word_embeddings": True, "rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 2},
    ),
    "v2": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": None, "topk_group": None, "n_shared_experts": 2,
         "topk_method": "greedy"},
    ),
    "v2-groups": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": 28, "n_group": 3, "topk_group": 2, "n_shared_experts": 1,
         "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0, "first_k_dense_replace": 0},
    ),
    "dsa": (
        "GlmMoeDsa",
        {**DEEPSEEK, "q_lora_rank": 28, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_hidden_layers": 4,
         "index_n_heads": 24, "index_head_dim": 12, "index_topk": 9, "index_topk_freq": 2},
    ),
    "late": (
        "LongcatFlash",
        {**{name: size for name, size in SIZES.items() if name not in ("num_hidden_layers", "num_key_value_heads")},
         "num_layers": 2, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 24, "head_dim": 8, "q_lora_rank": 28,
         "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16, "n_routed_experts": 10,
         "zero_expert_num": 4, "moe_topk": 3, "routed_scaling_factor": 2.0},
    ),
    "qwen3": (
        "Qwen3Moe",
        {**SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16,
         "num_experts": 10, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-tied": (
        "Qwen3Moe",
        {**SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "num_key_value_heads": 4, "head_dim": 24,
         "num_experts": 7, "num_experts_per_tok": 2, "norm_topk_prob": False, "tie_word_embeddings": True,
         "attention_bias": True, "decoder_sparse_step": 2},
    ),
    "mixtral": (
        "Mixtral",
        {**SIZES, "intermediate_size": 40, "num_key_value_heads": 2, "num_local_experts": 5,
         "num_experts_per_tok": 2},
    ),
    "mixtral-window": (
        "Mixtral",
        {**SIZES, "intermediate_size": 40, "num_key_value_heads": 1, "num_local_experts": 4,
         "num_experts_per_tok": 2, "sliding_window": 20},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16,
         "num_experts": 10, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 32,
         "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 12, "linear_value_head_dim": 20},
    ),
}  # fmt: skip


# What `--quick` does not even import: they start processes, a compiler, or an interpreter of kernels.
NOT_QUICK = ("e2e", "cuda", "kernels/triton")
# And what it imports but does not run: a test says so itself, by one of these marks.
NOT_QUICK_MARKS = ("process", "slow", "long", "alone")
QUICK_CASES = 1  # of each test
OBJECTS = 10_000  # between two looks for circles
LONG_SECONDS = 3600  # a test marked `long` may take, where it does not say more itself
DAY_SHARE = (
    0.1  # of the examples that a test asks for, and six at least; `--whole`, as by night, draws all of them
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"unit tests of all rooms: no processes, {QUICK_CASES} case of each test, {QUICK_EXAMPLES} drawn examples",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="tests draw all the examples that they ask for, and others each time; --hypothesis-seed says which",
    )
    parser.addoption(
        "--alone",
        action="store_true",
        help="tests marked alone; files that have none are not even imported",
    )
    parser.addoption(
        "--workers",
        type=int,
        default=0,
        help="how many processes run files of tests beside each other (none: this one runs all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Compiled modules are kept, whatever the shell says: tests start hundreds of interpreters. Circles are looked for
    less often than Python does by itself, which is a twentieth of the time of tests with many small objects."""
    gc.set_threshold(OBJECTS)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for a torch that a test imports first
    if config.getoption("--whole") or config.getoption("--hypothesis-seed") is not None:
        draw_by_night()
    elif config.getoption("--quick"):
        draw_few()
    if config.getoption("--alone") and not config.option.markexpr:
        config.option.markexpr = "alone and not long"
    if config.getoption("--workers"):
        imported = ["afserve.launch.run.serving"]  # what it imports is two thirds of all modules
        if not config.getoption("--alone"):
            imported.append("transformers.modeling_utils")
        config.pluginmanager.register(Beside(config.getoption("--workers"), imported), "beside")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What all files import stays to the end: no collection walks it, neither while it comes nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # or libraries complain at the end that it was never freed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test, and the fixtures that it is the first to ask for, draw without a seed of their own does not depend
    on the tests before it; nor does how many threads torch has. Several that wait for each other make small tensors
    many times slower on a busy machine."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:  # which begins with a seed of its own that is always the same
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the stack, too: a millisecond
        torch.set_num_threads(1)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """No item is made of a case that will not be run: to make all of twenty-five thousand takes each worker seconds."""
    if not metafunc.config.getoption("--quick"):
        leave_the_rest_to_the_night(metafunc)
        if "not long" in metafunc.config.option.markexpr:
            make_none_of_the_night(metafunc)
    elif len(metafunc._calls) > QUICK_CASES:
        wanted = [
            call for call in metafunc._calls if not {mark.name for mark in call.marks} & {*NOT_QUICK_MARKS}
        ]
        metafunc._calls = (wanted or metafunc._calls)[:QUICK_CASES]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--quick") and _left_out(collection_path):
        return True
    return True if config.getoption("--alone") and _has_none_alone(collection_path) else None


def _has_none_alone(path: Path) -> bool:
    """To import all files takes longer than to read them."""
    return path.suffix == ".py" and "mark.alone" not in path.read_text(encoding="utf-8")


def _left_out(path: Path) -> bool:
    if any(path.is_relative_to(Path(__file__).parent / folder) for folder in NOT_QUICK):
        return True
    return path.match("test_*.py") and has_none_quick(path.read_text(encoding="utf-8"))


def has_none_quick(text: str) -> bool:
    """Whether the file, or each of its tests, has a mark that says so: as above, of one file in ten."""
    marked = rf"pytest\.mark\.({'|'.join(NOT_QUICK_MARKS)})\b"
    if re.search(rf"^pytestmark = .*{marked}", text, re.MULTILINE):
        return True
    decorators = [found[0] for found in re.findall(_TEST, text, re.MULTILINE)]
    return bool(decorators) and all(re.search(f"^@{marked}", each, re.MULTILINE) for each in decorators)


_TEST = r"((^@.*\n(^[ )\]}].*\n)*)*)^(async )?def test_"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of what each file has: a sample, or fewer drawn examples by day."""
    if config.getoption("--quick"):
        kept = quick_sample(items)
        known = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in known])
        items[:] = kept
        return
    if not config.getoption("--whole"):
        for item in {getattr(item, "obj", None): item for item in items}.values():
            draw_at_most(item, lambda own: max(6, int(DAY_SHARE * own)))
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


def quick_sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test without processes the first cases."""
    seen: Counter[tuple[Path, str]] = Counter()
    kept = []
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        if seen[test] < QUICK_CASES and not any(item.get_closest_marker(mark) for mark in NOT_QUICK_MARKS):
            seen[test] += 1
            kept.append(item)
            draw_at_most(item, lambda own: QUICK_EXAMPLES)
    return kept


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests, and the processes that they start, leave nothing in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("caches")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def warm_until_the_end(caches: Path) -> Iterator[None]:
    """Interpreters that have started for some test."""
    yield
    for one in (WARM, TEXTS):
        one.close()


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each client of httpx reads all authorities that its machine trusts: 30 ms of a core, and tests ask servers in
    loops, by a new client each time. Here they read one. Tests have no network, and those of TLS trust their own."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("authorities") / "one.pem"
        path.write_text(first + end, encoding="utf-8")
        patch.setenv("SSL_CERT_FILE", str(path))
        yield path


@pytest.fixture(scope="session")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`kept(name)`: a folder that pytest keeps from run to run; with `-p no:cacheprovider` it is of this run."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp if cache is None else cache.mkdir


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny float32 checkpoint by its name in TINY; built on first use, seeded."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = _build(name, tmp_path_factory.mktemp(name.replace("-", "_")))
        return made[name]

    return make


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """The transformers model of a tiny checkpoint, in float32, with plain attention."""
    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            import torch
            import transformers

            model_class = getattr(transformers, TINY[name][0] + "ForCausalLM")
            loaded[name] = model_class.from_pretrained(
                tiny_checkpoint(name), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return loaded[name]

    return load


def _build(name: str, folder: Path) -> Path:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, fields = TINY[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(**fields))
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.sub_(4.0)  # a state keeps most of itself, or what is in it would hardly matter
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def fp8_folder(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny V3 in DeepSeek's layout: e4m3 projections with 128x128 `weight_scale_inv`."""
    from safetensors.torch import load_file, save_file

    from afserve.kernels.formats.scaled import quantised_blocks

    source, folder = tiny_checkpoint("v3"), tmp_path_factory.mktemp("fp8")
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        if "_proj" in name and tensor.dim() == 2:
            blocks = quantised_blocks(tensor)
            stored[name], stored[name + "_scale_inv"] = blocks.q_OI, blocks.scale
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`issued(role, ..., by="mine", days=1, now=None, addresses=())`: a folder with a certificate, by authority `by`.

    Skips where the package that issues them is not installed.
    """
    pytest.importorskip("cryptography", reason="certificates need afserve[tls]")
    from afserve.launch.sites.authority import Subject, issue, make_authority, roles_of

    top = tmp_path_factory.mktemp("certificates")

    def make(*roles: str, by: str = "mine", addresses: tuple[str, ...] = (), **validity: Any) -> Path:
        if not (top / by).exists():
            make_authority(top / by, 1)
        folder = top / f"host-{len(list(top.iterdir()))}"
        subject = Subject("host", roles_of(roles), addresses)
        return issue(top / by, subject, folder, **{"days": 1, **validity}).parent

    return make
