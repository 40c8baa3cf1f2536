"""From a Hugging Face id to a folder in its cache that holds what some roles read, at one commit."""

import os
import re
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from afserve.errors import CheckpointError, ConfigError, DoesNotFitError, ProtocolError, shown
from afserve.launch.hub.cache import CachedModel, is_hub_id
from afserve.launch.hub.download import DEFAULT_ENDPOINT, Hub, Progress
from afserve.launch.hub.listing import HubFile, Listing, total
from afserve.models.shards import INDEX, read_index

_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_AT_ONCE = 4
_SPARE = 1 << 30  # bytes of the disk that stay free


def hub_of(model: str) -> Hub:
    """Where Hugging Face's variables point, with their token. Raises ConfigError."""
    if not is_hub_id(model):
        raise ConfigError(f"{shown(model)}: not a Hugging Face id (owner/name)", param="model")
    return Hub(
        model, os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, os.environ.get("HF_TOKEN") or _token()
    )


def pull(
    hub: Hub, revision: str, roles: Collection[str], progress: Progress = lambda file, done: None
) -> Path:
    """The snapshot folder of the commit. `roles`: attention and expert, or one of them.

    What is there already is not fetched again; what has come stays. Raises CheckpointError where the repository is
    not what afserve reads, DoesNotFitError where the disk is too small, ConfigError where it cannot be written to, and
    what `Hub` raises.
    """
    if not _REVISION.fullmatch(revision):
        raise ConfigError(f"--revision {shown(revision)}: not a commit, branch or tag")
    cached = CachedModel(hub.model)
    with cached.locked():
        listing = hub.listing(revision)
        try:
            folder = _bring(hub, cached, listing, roles, progress)
            cached.name(revision, listing.commit)
        except (CheckpointError, ProtocolError) as error:
            raise CheckpointError(f"{hub.model} at {listing.commit[:12]}: {error.message}") from error
        except OSError as error:
            raise ConfigError(
                f"{cached.folder}: cannot be written to: {error.strerror or error}; make room there, or set HF_HOME to "
                "a larger disk; what has come is kept, start it again"
            ) from error
    return folder


def _bring(
    hub: Hub, cached: CachedModel, listing: Listing, roles: Collection[str], progress: Progress
) -> Path:
    """The texts first: the index says which weights a role reads."""
    folder = cached.folder / "snapshots" / listing.commit
    texts = listing.texts()
    _check_room(cached, texts)
    _fetch(hub, cached, listing.commit, texts, progress)
    shards = listing.shards(read_index(folder) if INDEX in listing.files else None, roles)
    _check_room(cached, shards)
    _fetch(hub, cached, listing.commit, shards, progress)
    return folder


def _fetch(hub: Hub, cached: CachedModel, commit: str, files: Sequence[HubFile], progress: Progress) -> None:
    """Some at once; where one fails, or the user has enough, the others end with their next piece."""
    over = Event()

    def heard(file: HubFile, done: int) -> None:
        if over.is_set():
            raise InterruptedError
        progress(file, done)

    def one(file: HubFile) -> None:
        hub.fetch(commit, file, cached.blob(file), heard)
        cached.link(commit, file)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        running = [threads.submit(one, file) for file in files]
        try:
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            over.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _check_room(cached: CachedModel, files: Sequence[HubFile]) -> None:
    missing = [file for file in files if not cached.blob(file).is_file()]
    needed = total(missing) - sum(cached.begun(file) for file in missing)
    free = shutil.disk_usage(cached.folder).free
    if needed > 0 and needed + _SPARE > free:
        raise DoesNotFitError(
            f"{cached.folder}: {needed / 2**30:,.1f} GiB are to come and {free / 2**30:,.1f} GiB are free; make room, "
            "or set HF_HOME to a larger disk"
        )


def _token() -> str | None:
    """What `hf auth login` has left."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    try:
        return (home / "token").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
