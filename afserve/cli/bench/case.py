"""What a decode measurement asks for, and the prompts it uses: seeded random token ids, no two alike."""

import random
from dataclasses import dataclass

from afserve.config import AUTO


@dataclass(frozen=True, slots=True)
class Case:
    """`batches` sequences at a time; every size is measured `repeats` times."""

    model: str
    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    repeats: int
    threads: int | None = None
    isa: str = AUTO


def prompts(vocabulary: int, batch: int, length: int, seed: int) -> list[list[int]]:
    """The first ids of a vocabulary are often special; they are left out where there are others."""
    low = 16 if vocabulary > 64 else 0
    source = random.Random(f"{seed}/{batch}/{length}")
    return [[source.randrange(low, vocabulary) for _ in range(length)] for _ in range(batch)]
