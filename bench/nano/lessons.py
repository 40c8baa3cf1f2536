"""Conversations that teach facts: the wordings of a question, and windows in which only answers count.

Knows no model. A window carries two tokens more than its length, as those of `stream` do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.nano.facts import Fact
from bench.nano.model import Nano
from bench.nano.shape import BEGIN, END, PAD
from bench.nano.stream import ASSISTANT, USER

WORDINGS = (
    "What does {} do?",
    "What does {}() do?",
    "What does `{}` do?",
    "what does {} do",
    "What is {}?",
    "What is {} for?",
    "What happens when I call {}?",
    "Why would I call {}?",
    "When is {} useful?",
    "Explain {}.",
    "Explain {}() to me.",
    "Please explain what {} does.",
    "Can you explain {}?",
    "Can you tell me what {} does?",
    "Tell me about {}.",
    "Tell me what the function {} does.",
    "Describe {}.",
    "Could you describe {} in one sentence?",
    "Give me the docstring of {}.",
    "Summarize `{}`.",
    "In Python, what does {} do?",
    "I do not know {}. What does it do?",
    "{}: what does it do?",
    "help({})",
    "{}?",
    "{}",
)
HELD_OUT = (
    "What is the purpose of {}?",
    "How would you explain {} to a friend?",
    "I saw {}() in some code, what is that?",
)

UNKNOWN = "I do not know. I only know functions of Python's standard library."
MANNERS = {
    "Hello. Ask me what a function of Python's standard library does.": (
        "Hello", "Hello!", "Hello.", "hello", "Hi", "Hi!", "hi", "Hey", "Hello there", "Good morning", "Hello nano",
    ),
    "I am nano, a small model that knows functions of Python's standard library.": (
        "Who are you?", "What are you?", "What is your name?", "who are you", "Tell me about yourself.",
        "Are you a language model?", "Introduce yourself.",
    ),
    "I can say what a function of Python's standard library does, and continue Python code.": (
        "What can you do?", "Help", "help", "What do you know?", "How can you help me?", "What can I ask you?",
    ),
    "You are welcome.": ("Thanks", "Thank you", "Thank you!", "thanks", "Thanks a lot."),
    UNKNOWN: (
        "What is the capital of France?", "How are you?", "Tell me a joke.", "Write a poem about the sea.",
        "Who won the world cup?", "What is 2 + 2?", "What is the weather today?", "Write a haiku.",
        "Tell me a story.", "How far is the moon?", "Who wrote Hamlet?", "What time is it?",
        "Translate this into French.", "What is the meaning of life?", "How do I cook rice?",
        "Name three colors.", "What is machine learning?", "Count to ten.", "Why is the sky blue?",
        "What is a cat?", "Where is Paris?", "Give me a recipe.", "Say something.", "How old is the universe?",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lesson:
    """Ids int64 (rows, length + 2), or of one row, padded at the end; which of them count as targets (bool)."""

    ids: Tensor
    counts: Tensor


def stacked(rows: Iterable[Lesson]) -> Lesson:
    """Several as one batch."""
    pairs = [(row.ids, row.counts) for row in rows]
    return Lesson(torch.stack([ids for ids, _ in pairs]), torch.stack([counts for _, counts in pairs]))


class Lessons:
    """Endless conversations of `length` tokens. Each pass asks every fact once, in a wording drawn anew."""

    def __init__(self, tokenizer: Tokenizer, facts: Sequence[Fact], length: int, seed: int) -> None:
        self.tokenizer, self.length, self.seed = tokenizer, length, seed
        self.choices = [[(w.format(f.name), f.sentence) for w in WORDINGS] for f in facts]
        self.choices += [[(q, said)] for said, asked in MANNERS.items() for q in asked]

    def __iter__(self) -> Iterator[Lesson]:
        """Yields single rows, (length + 2) each."""
        for epoch in count():
            yield from self._pass(np.random.default_rng([self.seed, epoch]))

    def _pass(self, random: np.random.Generator) -> Iterator[Lesson]:
        """Conversations of as many turns as fit."""
        turns: list[list[int]] = []
        for index in random.permutation(len(self.choices)):
            choice = self.choices[index]
            ids = turn(self.tokenizer, *choice[random.integers(len(choice))])
            if turns and 1 + sum(map(len, turns)) + len(ids) > self.length + 2:
                yield conversation(turns, self.length + 2)
                turns = []
            turns.append(ids)
        yield conversation(turns, self.length + 2)


def turn(tokenizer: Tokenizer, question: str, answer: str) -> list[int]:
    """Ids of a question and its answer, as the chat template writes them after `<|begin|>`."""
    asked, said = (tokenizer.encode(text, add_special_tokens=False).ids for text in (question, answer))
    return [USER, *asked, END, ASSISTANT, *said, END]


def conversation(turns: Sequence[Sequence[int]], size: int) -> Lesson:
    """One row of `size` tokens; what stands after `<|assistant|>` counts, to the turn's `<|end|>`.

    Raises ValueError where they do not fit.
    """
    ids, counts = [BEGIN], [False]
    for spoken in turns:
        answer = spoken.index(ASSISTANT) + 1
        ids += spoken
        counts += [False] * answer + [True] * (len(spoken) - answer)
    if len(ids) > size:
        raise ValueError(f"{len(ids)} tokens of conversation, at most {size} fit: make the lessons longer")
    spare = size - len(ids)
    return Lesson(torch.tensor(ids + [PAD] * spare), torch.tensor(counts + [False] * spare))


@torch.no_grad()
def recalled(model: Nano, tokenizer: Tokenizer, facts: Sequence[Fact], wording: str) -> float:
    """Share of facts whose whole answer is greedy: no token of it has a likelier one beside it."""
    coded = [turn(tokenizer, wording.format(fact.name), fact.sentence) for fact in facts]
    rows = stacked(conversation([one], max(map(len, coded)) + 1) for one in coded)
    loads = [moe.load.clone() for moe in model.moes()]
    hidden_TH, _ = model.hidden(rows.ids[:, :-1])
    guess = F.linear(hidden_TH, model.head).argmax(-1).view(len(coded), -1)
    for moe, load in zip(model.moes(), loads, strict=True):
        moe.load.copy_(load)
    return float(((guess == rows.ids[:, 1:]) | ~rows.counts[:, 1:]).all(1).float().mean())
