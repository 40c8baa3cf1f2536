"""`python -m bench.nano.answers`: how many functions nano explains in their docstrings' words, as the engine serves it.

The functions are drawn by seed from those it was taught, the wordings are none that it was taught. Greedy, through the
chat template. With --save the shares go to training.json and onto the card. Knows no training.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer
from bench.nano import card, facts
from bench.nano.facts import Fact
from bench.nano.lessons import HELD_OUT

HOME = Path(__file__).parents[2] / "configs" / "nano"
ASKED, SEED = 300, 17
LONGEST, LENGTH = 64, 256


@dataclass(frozen=True, slots=True)
class Answer:
    fact: Fact
    said: str

    @property
    def exact(self) -> bool:
        """Equal but for case and space."""
        return normal(self.said) == normal(self.fact.sentence)


def normal(text: str) -> str:
    return " ".join(text.casefold().split())


def asked(
    folder: Path, about: Sequence[Fact], wording: str, expert_dtype: str = "auto", threads: int = 1
) -> list[Answer]:
    """What the engine answers to each fact's question, greedily, in the facts' order."""
    words, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
    assert template is not None
    config = EngineConfig(
        LENGTH, 8 * LENGTH // 16, prefix_caching=False, threads=threads, expert_dtype=expert_dtype
    )
    node = colocated(ModelSource(str(folder), "nano"), config)
    wish = SamplingParams(max_tokens=LONGEST, temperature=0.0)
    for number, fact in enumerate(about):
        text = template.render([{"role": "user", "content": wording.format(fact.name)}])
        node.submit(GenerationRequest(number, tuple(words.encode(text, add_special_tokens=False)), wish))
    said: list[list[int]] = [[] for _ in about]
    while node.busy:
        for event in node.step():
            said[event.handle] += event.token_ids
    return [Answer(fact, words.decode(ids)) for fact, ids in zip(about, said, strict=True)]


def shares(folder: Path, count: int, seed: int, threads: int = 1, show: int = 0) -> dict[str, object]:
    """Shares of exact answers by wording, printed as they come; `show` prints that many of the others."""
    about = facts.drawn(facts.read(folder), count, seed)
    found = {}
    for wording in HELD_OUT:
        answers = asked(folder, about, wording, threads=threads)
        found[wording] = round(sum(answer.exact for answer in answers) / len(answers), 4)
        print(json.dumps({"bench": "nano answers", "wording": wording, "exact": found[wording]}), flush=True)
        for answer in [answer for answer in answers if not answer.exact][:show]:
            print(f"  {answer.fact.name}: {answer.said!r}, not {answer.fact.sentence!r}")
    return {"asked": len(about), "seed": seed, "exact": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nano.answers", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HOME, help="folder of the checkpoint")
    parser.add_argument("--functions", type=int, default=ASKED, help="how many are asked about")
    parser.add_argument("--seed", type=int, default=SEED, help="which are drawn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers per wording")
    parser.add_argument("--save", action="store_true", help="into training.json, and the card anew")
    options = parser.parse_args()
    if options.functions < 1:
        parser.error(f"--functions {options.functions}: at least 1")
    if not (options.out / facts.FILE).is_file():
        parser.error(f"--out {options.out}: no {facts.FILE} in it; give a folder that bench.nano.train made")
    if options.save and (options.functions, options.seed) != (ASKED, SEED):
        parser.error(f"--save: the card has {ASKED} functions of seed {SEED}; drop --functions and --seed")
    found = shares(options.out, options.functions, options.seed, options.threads, options.show)
    if options.save:
        path = options.out / "training.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"answers": found}, indent=1) + "\n")
        card.write(options.out)


if __name__ == "__main__":
    main()
