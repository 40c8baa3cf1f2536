"""flash-linear-attention's rules as moves of states: by doubles of its signatures anywhere, and itself, interpreted,
where `pip install fla-core` ran."""

import builtins
import gc
import importlib.util
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from afserve.kernels.delta import DeltaShape
from afserve.kernels.layer import MixerParts, StateLayer
from afserve.kernels.libraries.library import Libraries
from afserve.kernels.libraries.tested import expect_close
from afserve.kernels.states.rules import StateMoves, segments, step
from afserve.kernels.triton.backend import TritonBackend
from afserve.launch.plan.checkup import libraries
from afserve.launch.plan.checkup_disk import NOTE, OK
from tests.kernels.test_delta import batch_of, layer_of, rows_of
from tests.kernels.triton.declared import expect_declared

RULES = pytest.mark.parametrize("rule", ["head", "channel"])
INSTALLED = importlib.util.find_spec("fla") is not None


class Double:
    """Right answers by our own rules, in the library's shapes; `spoil` makes others of them."""

    def __init__(self, spoil):
        self.calls, self._spoil = [], spoil

    def fused_recurrent_gated_delta_rule(
        self, q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    ):  # fmt: skip
        self.calls.append("step by head")
        return self._steps(q, k, v, g[..., None], beta, scale, initial_state, "head")

    def fused_recurrent_kda(
        self, q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    ):  # fmt: skip
        self.calls.append("step by channel")
        return self._steps(q, k, v, g, beta, scale, initial_state, "channel")

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False
    ):  # fmt: skip
        self.calls.append(f"{q.shape[1]} by head")
        return self._chunk(q, k, v, g[..., None], beta, scale, initial_state, "head")

    def chunk_kda(self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        self.calls.append(f"{q.shape[1]} by channel")
        return self._chunk(q, k, v, g, beta, scale, initial_state, "channel")

    def _steps(self, q, k, v, g, beta, scale, state, rule):
        assert q.shape[1] == 1 and scale == 1.0 and state.dtype is torch.float32
        seen, state = step(*(x[:, 0] for x in (q, k, v, g, beta)), state, rule)
        return self._spoil(seen[:, None].to(q.dtype)), state

    def _chunk(self, q, k, v, g, beta, scale, state, rule):
        assert q.dtype is k.dtype is v.dtype is torch.bfloat16 and scale == 1.0 and len(q) == len(state) == 1
        heads_first = (x[0].float().transpose(0, 1) for x in (q, k, v, g, beta))
        seen, state = segments(*heads_first, state[0], rule)
        return self._spoil(seen.transpose(0, 1)[None].to(q.dtype)), state[None]


@pytest.fixture
def installed(monkeypatch):
    def install(spoil=lambda answer: answer):
        double = Double(spoil)
        names = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")
        modules = {name: ModuleType(name) for name in names}
        modules["fla"].__path__ = modules["fla.ops"].__path__ = []
        modules["fla"].__version__ = "0.6.0"
        for name in ("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"):
            setattr(modules[names[2]], name, getattr(double, name))
        for name in ("fused_recurrent_kda", "chunk_kda"):
            setattr(modules[names[3]], name, getattr(double, name))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return double

    return install


def shape_of(rule, size=12):
    return DeltaShape(key_heads=1, value_heads=2, key=size, value=20, taps=4, rule=rule)


def opened(device, shape):
    """A backend whose library was tested with such a layer."""
    backend = TritonBackend(device, multiprocessors=2, libraries=Libraries.open_named("fla", device))
    norm_H = torch.ones(8).bfloat16()
    parts = MixerParts(shape.rule, None, None, delta=layer_of(shape=shape))
    assert backend.prepare_states(StateLayer(parts, norm_H, norm_H, None, None, None, None, 1e-6)) is None
    return backend


def moved(backend, shape, device, tokens=40):
    """Two prompts in blocks of 16, and then a token of each: what they read, and the states."""
    rows, layer = rows_of(tokens + 7 + 2, 0, torch.bfloat16, shape), layer_of(shape=shape)
    states_NF, read = torch.full((8, shape.numbers), float("nan")), []
    for begin, end, chunks in (
        (0, tokens + 7, [(0, tokens, [3, 1, 5]), (0, 7, [2, 4])]),
        (tokens + 7, tokens + 9, [(tokens, tokens + 1, [3, 1, 5]), (7, 8, [2, 4])]),
    ):
        part = torch.arange(begin, end)
        read.append(backend.delta(rows.of(part), layer, states_NF, 16, batch_of(chunks)))
    return torch.cat(read), states_NF


@RULES
def test_right_answers_are_used_block_by_block(installed, device, rule):
    double, shape = installed(), shape_of(rule)
    backend = opened(device, shape)
    assert double.calls == [f"step by {rule}", f"70 by {rule}"], "tested at load"
    read, states = moved(backend, shape, device)
    assert double.calls[2:] == [f"{n} by {rule}" for n in (16, 16, 8, 7)] + [f"step by {rule}"]
    own_read, own_states = moved(TritonBackend(device, multiprocessors=2), shape, device)
    expect_close("read", read, own_read, torch.finfo(torch.bfloat16).eps, least=0.0)
    expect_close("states", states, own_states, torch.finfo(torch.bfloat16).eps, least=0.0)
    assert backend.explain().endswith("fla-core 0.6.0 computes delta, one token, delta, prompts")


def wrong(answer):
    return answer * 1.1


def raises(answer):
    raise OutOfResources(300_000, 232_448, "shared memory")


@RULES
@pytest.mark.parametrize("spoil", [wrong, raises])
def test_wrong_answers_and_failures_are_our_own(installed, device, rule, spoil):
    """At load, and, for what fails, while serving too."""
    shape, own = shape_of(rule), TritonBackend(device, multiprocessors=2)
    truth = moved(own, shape, device)
    double = installed(spoil)
    refused = opened(device, shape)
    assert refused.explain().count(" not: ") == 2 and "computes nothing" in refused.explain()
    for answer, right in zip(moved(refused, shape, device), truth, strict=True):
        torch.testing.assert_close(answer, right, rtol=0, atol=0, equal_nan=True)
    double = installed()
    backend = opened(device, shape)
    double._spoil = raises
    read, states = moved(backend, shape, device)
    eps = torch.finfo(torch.bfloat16).eps  # what could not be computed in 16 bits was in float32
    expect_close("read", read, truth[0], eps, least=0.0)
    expect_close("states", states, truth[1], eps, least=0.0)
    assert backend.explain().count("while serving: OutOfResources: out of resource") == 2
    assert len(double.calls) == 2 + 2, "each was asked once more"


def test_other_rules_and_rows_are_our_own(installed, device):
    installed()
    libraries = Libraries.open_named("fla", device)
    libraries.test_delta(shape_of("sum"), torch.bfloat16)
    libraries.test_delta(shape_of("head"), torch.float32)
    assert libraries.moves(shape_of("head"), torch.float32) == StateMoves()
    assert libraries.opened[0].ops.passed == {}


def test_doctor_tells_what_is_installed_and_of_use(installed, device, monkeypatch):
    installed()
    monkeypatch.setattr("importlib.util.find_spec", {"fla": object()}.get)
    (found,) = libraries(str(device))
    assert (found.what, found.level) == ("fla", OK) and "--gpu-kernels fla" in found.found
    monkeypatch.setattr(sys.modules["fla"], "__version__", "0.5.2")
    (found,) = libraries(str(device))
    assert found.level == NOTE and "fla-core 0.5.2 here, and 0.6 is the oldest" in found.found


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fused_recurrent_gated_delta_rule", "gated_delta_rule/fused_recurrent.py"),
        ("chunk_gated_delta_rule", "gated_delta_rule/chunk.py"),
        ("fused_recurrent_kda", "kda/fused_recurrent.py"),
        ("chunk_kda", "kda/chunk.py"),
    ],
)
def test_the_double_is_called_as_the_library_is(name, file):
    expect_declared(getattr(Double(None), name), "fla", f"ops/{file}")


@pytest.mark.filterwarnings("ignore")  # its own, of a machine without a GPU
@pytest.mark.skipif(not INSTALLED, reason="fla-core is not installed")
@RULES
def test_the_library_itself(device, rule, monkeypatch):
    """Interpreted without a GPU: the first tile of each kernel, and loops whose counters are Triton's."""
    if device.type == "cpu":
        states = import_module("fla.ops.common.chunk_delta_h")
        import_module("fla.ops.kda")  # kernels exist before their tiles are chosen
        monkeypatch.setattr(states, "range", scalars, raising=False)
        for one in gc.get_objects():
            if isinstance(one, Autotuner):
                one.configs = one.configs[:1]
    shape = shape_of(rule, size=16)
    with torch.inference_mode():
        backend = opened(device, shape)
        assert " not: " not in backend.explain()
        read, states_NF = moved(backend, shape, device)
    own_read, own_states = moved(TritonBackend(device, multiprocessors=2), shape, device)
    expect_close("read", read, own_read, torch.finfo(torch.bfloat16).eps, least=0.0)
    expect_close("states", states_NF, own_states, torch.finfo(torch.bfloat16).eps, least=0.0)
    assert " not: " not in backend.explain()


def scalars(*bounds):
    numbers = (int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in bounds)
    for i in builtins.range(*numbers):
        yield tl.full((), i, tl.int32)
