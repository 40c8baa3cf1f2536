"""Our side of `bench.kt_kernel` as its process runs it, and what the other side is handed; kt-kernel is not needed."""

import sys

import pytest
import torch

from bench import kt_kernel, kt_kernel_worker
from bench.kt_kernel_worker import E2M1, GROUP, codes_of, packed_nibbles


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_codes_and_nibbles_say_the_same(form: str) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    made = codes_of(weight, form == "mxfp4")
    assert made.scale_OG.shape == (6, 64 // GROUP)
    assert ((made.dequantised() - weight.float()).norm() / weight.float().norm()) < 0.2
    packed = packed_nibbles(made.code_OI, form)
    nibble = torch.stack((packed & 15, packed >> 4), 2).view(6, 64).long()
    value = nibble - 8 if form == "int4" else E2M1.long()[nibble & 7] * (1 - 2 * (nibble >> 3))
    assert torch.equal(value, made.code_OI.long())


@pytest.mark.parametrize("form", list(kt_kernel.FORMS))
def test_our_side_computes_what_it_is_asked(form: str) -> None:
    layer = kt_kernel_worker.Layer(4, 64, 32, 2)
    engine = kt_kernel_worker.Ours(form, layer, 1, "")
    assert kt_kernel_worker.error_of(engine, layer, 3, 1) < kt_kernel.FORMS[form]
    assert kt_kernel_worker.seconds_of(engine, layer, 2, 1, 0.0) > 0


@pytest.mark.slow
def test_the_process_answers_line_by_line_and_is_stopped_between() -> None:
    side = kt_kernel.Side(
        [
            sys.executable,
            "-m",
            "bench.kt_kernel_worker",
            "ours",
            "bf16",
            "4",
            "64",
            "32",
            "2",
            "1",
            "8",
            "generic",
        ],
        1,
    )
    try:
        assert side.isa == "generic" and side.ask("error", rows=2, seed=0, check=True) < 0.02
        assert side.ask("us", rows=8, seed=0, seconds=0.0) > 0
    finally:
        side.close()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--shapes", "llama"], "'llama' is none of qwen3-30b-a3b"),
        (["--forms", "int3"], "'int3' is none of bf16"),
        (["--rows", "0"], "no list of numbers from 1 to 4096"),
    ],
)
def test_what_it_does_not_know_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    with pytest.raises(SystemExit):
        kt_kernel.main(["--kt-python", "python", *arguments])
    assert wanted in capsys.readouterr().err
