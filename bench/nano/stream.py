"""Token streams: documents and dialogues as one array of ids, cut into windows in a seeded order.

Knows no model. A window carries two tokens more than its length: the next-token targets and those
of the multi-token-prediction module.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.nano.corpus import Document, Turn
from bench.nano.shape import BEGIN, END, SPECIAL

USER, ASSISTANT = SPECIAL.index("<|user|>"), SPECIAL.index("<|assistant|>")


def encode_documents(tokenizer: Tokenizer, docs: Sequence[Document]) -> list[np.ndarray]:
    """Ids of each document between `<|begin|>` and `<|end|>`."""
    texts = tokenizer.encode_batch([doc.text for doc in docs], add_special_tokens=False)
    return [np.array([BEGIN, *text.ids, END], dtype=np.uint16) for text in texts]


def encode_turns(tokenizer: Tokenizer, dialogue: Sequence[Turn]) -> list[np.ndarray]:
    """Ids of each question and answer, as the chat template writes them."""
    asked = tokenizer.encode_batch([turn.user for turn in dialogue], add_special_tokens=False)
    answered = tokenizer.encode_batch([turn.assistant for turn in dialogue], add_special_tokens=False)
    return [
        np.array([BEGIN, USER, *ask.ids, END, ASSISTANT, *answer.ids, END], dtype=np.uint16)
        for ask, answer in zip(asked, answered, strict=True)
    ]


class Windows:
    """Endless batches of windows. Each pass shuffles the pieces, cuts at a new offset, shuffles the cuts."""

    def __init__(self, pieces: Sequence[np.ndarray], length: int, rows: int, seed: int) -> None:
        self.pieces, self.length, self.rows, self.seed = pieces, length, rows, seed

    def __iter__(self) -> Iterator[Tensor]:
        """Yields int64 (rows, length + 2)."""
        epoch = 0
        while True:
            yield from self._epoch(np.random.default_rng([self.seed, self.length, epoch]))
            epoch += 1

    def _epoch(self, random: np.random.Generator) -> Iterator[Tensor]:
        order = random.permutation(len(self.pieces))
        stream = np.concatenate([self.pieces[i] for i in order])
        offset = int(random.integers(self.length))
        starts = np.arange(offset, len(stream) - self.length - 2, self.length)
        random.shuffle(starts)
        for i in range(0, len(starts) - self.rows + 1, self.rows):
            batch = np.stack([stream[s : s + self.length + 2] for s in starts[i : i + self.rows]])
            yield torch.from_numpy(batch.astype(np.int64))
