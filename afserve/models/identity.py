"""What makes one copy of a checkpoint the same as another: a digest of the weights that a role reads, and one of each
tokenizer file. Without torch, so that the gateway can compare its own copy too.

Of a tensor up to 16 KiB every byte is read, of a larger one four samples of 64 bytes. Another name, shape, dtype or
quantisation is always seen. Of other numbers: where a tenth of a bf16 tensor's differ, the 128 in the samples miss them
once in 700,000 times, and several such tensors are hardly ever missed. A single changed weight in 3 MiB is seen once in
12,000 times (256 bytes of them). Whoever has to know reads all bytes: `full`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from os import stat_result
from pathlib import Path

from afserve.config import ModelSource
from afserve.digest_cache import DigestCache
from afserve.errors import CheckpointError
from afserve.families.pattern.naming import ROUTED
from afserve.member import MODEL_ROLES, Role
from afserve.models.shards import SINGLE, ShardFile, StoredTensor, read_index
from afserve.models.tally import HOW, Tally, complete, sampled

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
DUMMY_SCALE = 0.02
_DUMMY_FORMAT = 2  # of how `DummyCheckpoint` makes numbers from a seed and a name
_BLOCK = 4 << 20
_READERS = 4
_DIGEST = re.compile(r"[0-9a-f]{16}")
_ABSENT = "absent"
_FULL = " (all bytes)"
Progress = Callable[[float], None]
Identity = dict[str, str]
Names = frozenset[str] | None  # of a file's tensors that the index takes from there; None: all


def weights_of(role: str, full: bool = False) -> str:
    """How a role's weights are called in an identity."""
    return f"{role} weights{_FULL}" if full else f"{role} weights"


def is_full(things: Mapping[str, str]) -> bool:
    """Whether an identity tells of all bytes as well."""
    return any(name.endswith(_FULL) for name in things)


def role_of(name: str) -> str:
    """Which nodes read a tensor: expert nodes the routed experts (`...mlp.experts.7...`), attention nodes the rest."""
    return "expert" if any(mark in name for mark in ROUTED) else "attention"


def identify(
    source: ModelSource,
    roles: Collection[str],
    cache: DigestCache,
    *,
    full: bool = False,
    progress: Progress = lambda done: None,
) -> Identity:
    """Name of a thing -> what it is here, as two hosts compare it. Raises CheckpointError for a broken checkpoint.

    `full` adds digests of all bytes, read anew; `progress` is told how far that is.
    """
    found: Identity = {}
    reading = [role for role in roles if role in MODEL_ROLES]
    if source.load_format == "dummy":
        made = f"random, seed {source.seed}, scale {DUMMY_SCALE}, format {_DUMMY_FORMAT}"
        found = {weights_of(role, each): made for role in reading for each in {False, full}}
    else:
        folder = Path(source.path)
        shards = _shards(folder)
        for role in reading:
            found[weights_of(role)] = str(_sampled(folder, shards, role, cache))
        if full:
            found |= _all_bytes(folder, shards, reading, progress)
    if {Role.ATTENTION, Role.GATEWAY}.intersection(roles):
        found |= {name: _text_digest(Path(source.path) / name, cache) for name in TEXT_FILES}
    cache.save()
    return found


def _shards(folder: Path) -> Mapping[str, Names]:
    index = read_index(folder)
    if index is None:
        return {SINGLE: None}
    names: dict[str, set[str]] = {}
    for name, file in index.items():
        names.setdefault(file, set()).add(name)
    return {file: frozenset(names[file]) for file in sorted(names)}


def _of_role(shards: Mapping[str, Names], role: str) -> dict[str, Names]:
    """Files without a tensor of the role need not be there."""
    chosen = {
        file: names if names is None else frozenset(name for name in names if role_of(name) == role)
        for file, names in shards.items()
    }
    return {file: names for file, names in chosen.items() if names is None or names}


def _sampled(folder: Path, shards: Mapping[str, Names], role: str, cache: DigestCache) -> Tally:
    chosen = _of_role(shards, role)
    if len(chosen) == 1:
        return sum((_sampled_file(folder / f, names, role, cache) for f, names in chosen.items()), Tally())
    with ThreadPoolExecutor(_READERS, "identity") as pool:
        found = [pool.submit(_sampled_file, folder / f, names, role, cache) for f, names in chosen.items()]
        return sum((tally.result() for tally in found), Tally())


def _sampled_file(path: Path, names: Names, role: str, cache: DigestCache) -> Tally:
    which = "all" if names is None else blake2b("\0".join(sorted(names)).encode(), digest_size=16).hexdigest()
    what = f"{role}:{which}:{HOW}"
    known = Tally.of_entry(cache.get(_stat(path), what))
    if known is not None:
        return known
    with ShardFile(path) as file:
        tally = sum((sampled(stored, file) for stored in _tensors(file, names, role)), Tally())
        file.check_unchanged()
        cache.put(file.found, what, tally.entry())
    return tally


def _all_bytes(
    folder: Path, shards: Mapping[str, Names], roles: Collection[str], progress: Progress
) -> Identity:
    """Every byte of the roles' tensors, one file after the other; no cache of ours has a say."""
    chosen = [(role, file, names) for role in roles for file, names in _of_role(shards, role).items()]
    tallies = dict.fromkeys(roles, Tally())
    todo = max(1, sum({file: _stat(folder / file).st_size for _, file, _ in chosen}.values()))
    done = 0
    for role, path, names in chosen:
        with ShardFile(folder / path) as file:
            for stored in _tensors(file, names, role):
                tallies[role] += complete(stored, file)
                done += stored.end - stored.begin
                progress(min(1.0, done / todo))
            file.check_unchanged()
    return {weights_of(role, full=True): str(tally) for role, tally in tallies.items()}


def _tensors(file: ShardFile, names: Names, role: str) -> list[StoredTensor]:
    """Those of a role, by name. Raises CheckpointError where one that the index names is missing."""
    found = [
        row for row in file.tensors() if role_of(row.name) == role and (names is None or row.name in names)
    ]
    missing = (names or frozenset()).difference(row.name for row in found)
    if missing:
        raise CheckpointError(f"{file.path}: tensor {min(missing)} is missing from the checkpoint")
    return found


def _text_digest(path: Path, cache: DigestCache) -> str:
    if not path.is_file():
        return _ABSENT
    known = (cache.get(_stat(path), "bytes") or {}).get("bytes", "")
    if _DIGEST.fullmatch(known):
        return known
    digest = blake2b(digest_size=8)
    with ShardFile(path) as file:
        for begin in range(0, file.found.st_size, _BLOCK):
            digest.update(file.read(min(_BLOCK, file.found.st_size - begin), begin))
        file.check_unchanged()
        cache.put(file.found, "bytes", {"bytes": digest.hexdigest()})
    return digest.hexdigest()


def _stat(path: Path) -> stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; download it again") from error
