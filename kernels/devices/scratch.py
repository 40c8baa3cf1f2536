"""Bytes that a node on a GPU takes beside weights and caches. Whoever plans its memory reads this: no torch here."""

TOGETHER = 1 << 16  # rows of latents that several sequences have together
LONGEST = 1 << 18  # rows of one; a longer sequence stays absorbed
PROMPTS = 256 << 20  # keys and values of some heads at a time, unless one head has more
PASSES = 256 << 20  # rows and parts of a call that names more experts than there are places
FLASHINFER = 128 << 20  # what its attention keeps, zero before its first use
OF_LIBRARIES = {"flashinfer": FLASHINFER}  # by the names of `GPU_LIBRARIES`


def of_prompts(columns: int, itemsize: int = 2) -> int:
    """To multiply latents up: those of the longest sequence, gathered, and what of them is multiplied at a time."""
    return LONGEST * columns * itemsize + PROMPTS
