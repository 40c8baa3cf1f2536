"""Files that llama.cpp's own converter and quantiser make, where LLAMA_CPP names a checkout of it: the tokens of the
folders that they were made of. Without one these tests are skipped.

The converter needs transformers and its own gguf-py, which lies beside it. `llama-quantize` is looked for in the
checkout's `build/bin`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import SamplingParams
from afserve.models.gguf.folder import unfold
from afserve.tokens.tokenizer import Tokenizer
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.models.gguf.conftest import TINY, build

LLAMA = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
NANO = Path(__file__).parents[3] / "configs" / "nano"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# The converter knows tokenizers by digests of what they make of one text; nano's is none of them.
CONVERT = """
import sys, runpy
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
import conversion, conversion.base
conversion.load_all_models()
classes = [conversion.base.ModelBase]
while classes:
    one = classes.pop()
    classes += one.__subclasses__()
    if "get_vocab_base_pre" in vars(one):
        one.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    if "set_vocab" in vars(one):
        one.set_vocab = lambda self: self._set_vocab_gpt2()
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (LLAMA / "convert_hf_to_gguf.py").is_file(), reason="LLAMA_CPP names no llama.cpp"
    ),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder with nano's tokenizer, and the file that llama.cpp makes of it."""
    made = {}

    def convert(name):
        if name not in made:
            folder = build(name, tmp_path_factory.mktemp(name), vocab_size=2064)
            for file in TOKENIZER:
                shutil.copy(NANO / file, folder)
            path = folder.parent / f"{name}.gguf"
            asked = [str(folder), "--outfile", str(path), "--outtype", "f32"]
            asked += ["--no-mtp"] if name == "qwen3.5" else []
            subprocess.run([sys.executable, "-c", CONVERT, str(LLAMA), *asked], check=True, timeout=300)
            made[name] = folder, path
        return made[name]

    return convert


def tokens_of(folder):
    asked = requests(prompts(), GREEDY)
    return collect(drive(colocated(ModelSource(str(folder), "m"), config()), asked))


@pytest.mark.parametrize("name", TINY)
def test_the_tokens_of_the_folder(name, converted, tmp_path):
    torch.set_num_threads(1)
    folder, path = converted(name)
    made = unfold(path, tmp_path / "made")
    assert tokens_of(made) == tokens_of(folder)
    ours, theirs = Tokenizer.from_folder(made), Tokenizer.from_folder(folder)
    assert [ours.token(i) for i in range(2048)] == [theirs.token(i) for i in range(2048)]
    assert ours.special == theirs.special
