"""Greedy text from a trained nano, for its card. Knows no cache: it runs the whole window for every token."""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from bench.nano.model import Nano
from bench.nano.shape import BEGIN, END, SPECIAL

PROMPTS = (
    "class Stack:\n    def push(self, item):",
    "import unittest\n\nclass TestQueue(unittest.TestCase):",
    f"{SPECIAL[4]}What does os.path.join do?{SPECIAL[END]}{SPECIAL[5]}",
)


@torch.no_grad()
def greedy(model: Nano, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt and at most `count` greedy tokens after it."""
    ids = [BEGIN, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    for _ in range(count):
        hidden_TH, _ = model.hidden(torch.tensor([ids]))
        ids.append(int(F.linear(hidden_TH[-1], model.head).argmax()))
        if ids[-1] == END:
            break
    return tokenizer.decode(ids[1:], skip_special_tokens=False)
