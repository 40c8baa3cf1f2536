"""What a hub says that a repository holds at one commit, and which of that a role reads. Values only.

Nothing is wanted that could hold a program: safetensors, JSON and a chat template.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from afserve.errors import CheckpointError, ProtocolError, shown
from afserve.member import MODEL_ROLES, Role
from afserve.models.identity import TEXT_FILES, role_of
from afserve.models.shards import INDEX, SINGLE

CONFIG = "config.json"
_COMMIT, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.+ ()-]{1,200}")
_MOST_BYTES = 1 << 50
_MOST_TEXT = 1 << 30  # bytes of a text that is fetched


@dataclass(frozen=True, slots=True)
class HubFile:
    """`digest` is the sha256 of a large file, or git's own name (sha1) of a small one; its length says which."""

    name: str
    size: int
    digest: str

    def hash(self) -> "hashlib._Hash":
        """What, fed with all bytes, has `digest`."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        found = hashlib.sha1(usedforsecurity=False)
        found.update(b"blob %d\0" % self.size)
        return found


@dataclass(frozen=True, slots=True)
class Listing:
    """One commit of a repository; files in folders are not listed."""

    commit: str
    files: Mapping[str, HubFile]

    @classmethod
    def read(cls, body: object) -> "Listing":
        """From the hub's JSON. Raises ProtocolError where it is not of that form."""
        fields = body if isinstance(body, dict) else {}
        commit, siblings = fields.get("sha"), fields.get("siblings")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise ProtocolError(f"not a hub's listing of a model: {shown(body)}")
        files = [_file(entry) for entry in siblings]
        return cls(commit, {file.name: file for file in files if file is not None})

    def texts(self) -> list[HubFile]:
        """What every role reads, the index of the weights included. Raises CheckpointError without a config.json.

        And where one is larger than any text is.
        """
        if CONFIG not in self.files:
            raise CheckpointError(f"no {CONFIG} in the repository: not a model in Hugging Face's layout")
        found = [self.files[name] for name in (CONFIG, *TEXT_FILES, INDEX) if name in self.files]
        for file in found:
            if file.size > _MOST_TEXT:
                raise CheckpointError(
                    f"{file.name}: {file.size:,} bytes are listed, at most {_MOST_TEXT:,} are fetched"
                )
        return found

    def shards(self, index: Mapping[str, str] | None, roles: Collection[str]) -> list[HubFile]:
        """The files of weights that these roles read: `index` is tensor -> file, None without one.

        Raises CheckpointError where one is missing, or the weights are no safetensors.
        """
        if index is None:
            wanted = {SINGLE}
        else:
            wanted = {file for name, file in index.items() if role_of(name) in roles}
        missing = sorted(wanted - self.files.keys())
        if missing:
            pickles = [name for name in self.files if name.endswith((".bin", ".pt", ".pth"))]
            others = f"; {pickles[0]} is not fetched, because such files can hold programs" if pickles else ""
            raise CheckpointError(f"no {missing[0]} in the repository{others}")
        return [self.files[name] for name in sorted(wanted)]


def roles_of(role: str | None) -> tuple[str, ...]:
    """Of a node's role; None: of all."""
    return tuple(str(Role(one)) for one in MODEL_ROLES) if role is None else (role,)


def total(files: Sequence[HubFile]) -> int:
    """Bytes."""
    return sum(file.size for file in files)


def _file(entry: object) -> HubFile | None:
    """None for what lies in a folder, which no checkpoint of ours reads."""
    fields = entry if isinstance(entry, dict) else {}
    name, size, blob = fields.get("rfilename"), fields.get("size"), fields.get("blobId")
    if isinstance(fields.get("lfs"), dict):
        blob = fields["lfs"].get("sha256")
    if isinstance(name, str) and ("/" in name or name.startswith(".")):
        return None
    good = isinstance(blob, str) and (_COMMIT.fullmatch(blob) or _SHA256.fullmatch(blob))
    sized = isinstance(size, int) and not isinstance(size, bool) and 0 <= size < _MOST_BYTES
    if not isinstance(name, str) or not sized or not good or not _NAME.fullmatch(name):
        raise ProtocolError(f"not a hub's entry for a file: {shown(entry)}")
    return HubFile(name, int(size or 0), str(blob))
