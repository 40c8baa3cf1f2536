"""What nano is worth on text it never saw: bits per byte, MTP acceptance, routing.

Knows no training. `Scored` windows slide over a whole file so that every token is predicted from at least
`CONTEXT - STRIDE` tokens before it, or from the file's beginning.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.nano.model import Nano
from bench.nano.shape import BEGIN, PAD

CONTEXT, STRIDE = 1024, 768


@dataclass(frozen=True, slots=True)
class Scored:
    """Ids of one window; targets of positions `first` and later count."""

    ids: list[int]
    first: int


def windows(ids: Sequence[int], context: int = CONTEXT, stride: int = STRIDE) -> Iterator[Scored]:
    """Windows of at most `context` predictions over `<|begin|>` and ids; every id counts exactly once."""
    full = [BEGIN, *ids]
    done = 0
    while done < len(full) - 1:
        stop = min(len(full) - 1, done + (stride if done else context))
        start = max(0, stop - context)
        yield Scored(full[start : stop + 1], done - start)
        done = stop


def batches(texts: Sequence[str], tokenizer: Tokenizer, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids (rows, CONTEXT + 1) padded at the end, mask (rows, CONTEXT) of targets that count)."""
    scored = [w for text in texts for w in windows(tokenizer.encode(text, add_special_tokens=False).ids)]
    for i in range(0, len(scored), rows):
        part = scored[i : i + rows]
        ids = torch.full((len(part), CONTEXT + 1), PAD)
        mask = torch.zeros(len(part), CONTEXT, dtype=torch.bool)
        for row, window in enumerate(part):
            ids[row, : len(window.ids)] = torch.tensor(window.ids)
            mask[row, window.first : len(window.ids) - 1] = True
        yield ids, mask


@dataclass(frozen=True, slots=True)
class Report:
    """Held-out figures. Shares are of one layer's routed rows, relative to the mean (1.0 = balanced)."""

    bits_per_byte: float
    bytes: int
    tokens: int
    top1: float
    mtp_top1: float
    mtp_agreement: float
    largest_share: list[float]
    smallest_share: list[float]


@torch.no_grad()
def evaluate(model: Nano, tokenizer: Tokenizer, texts: Sequence[str], rows: int = 8) -> Report:
    """Run every window of every text through the model and its MTP module."""
    nats = right = mtp_right = agreed = 0.0
    tokens = pairs = 0
    for moe in model.moes():
        moe.load.zero_()
    for ids, mask in batches(texts, tokenizer, rows):
        logits, draft = _predict(model, ids)
        target = ids[:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        nats += float(loss[mask].double().sum())
        guess = logits.argmax(-1)
        right += int((guess == target)[mask].sum())
        both = mask[:, 1:]
        mtp_right += int((draft == target[:, 1:])[both].sum())
        agreed += int((draft == guess[:, 1:])[both].sum())
        tokens, pairs = tokens + int(mask.sum()), pairs + int(both.sum())
    size = sum(len(text.encode()) for text in texts)
    shares = [(moe.load / moe.load.mean()) for moe in model.moes()]
    return Report(
        bits_per_byte=nats / math.log(2) / size,
        bytes=size,
        tokens=tokens,
        top1=right / tokens,
        mtp_top1=mtp_right / pairs,
        mtp_agreement=agreed / pairs,
        largest_share=[round(float(s.max()), 3) for s in shares],
        smallest_share=[round(float(s.min()), 3) for s in shares],
    )


def _predict(model: Nano, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, S, V) of the next token, and the MTP module's guesses (B, S - 1) of the one after it."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    x_TH, angles = model.hidden(ids[:, :-1])
    logits = F.linear(x_TH, model.head).float().view(rows, length, -1)
    embed_TH = F.embedding(ids[:, 1:].reshape(-1), model.embed)
    y_TH = model.mtp(embed_TH, x_TH, angles)
    draft = F.linear(y_TH, model.head).argmax(-1).view(rows, length)
    return logits, draft[:, :-1]


def sample(texts: dict[str, str], target: int) -> dict[str, str]:
    """Whole held-out files of moderate size, in path order, until `target` bytes."""
    chosen: dict[str, str] = {}
    for path in sorted(texts):
        if 2_000 <= len(texts[path]) <= 24_000:
            chosen[path] = texts[path]
        if sum(len(text.encode()) for text in chosen.values()) >= target:
            break
    return chosen
