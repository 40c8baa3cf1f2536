"""What a container runs: `python -m afserve.launch.sites.container [ARGUMENTS]`.

With arguments it becomes that afserve command. Without, it serves the bundled model on all of the container's
addresses, with a key that is made at the first start, kept in the state folder, and printed once. It speaks plain HTTP
then, for whatever publishes the container to speak HTTPS, unless it is given a certificate.
"""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from afserve.child import module

STATE = "AFSERVE_STATE"
CERTIFICATE = "AFSERVE_SSL_CERTFILE"  # as `up` reads it
_STATE = "/var/lib/afserve"
_EVERYWHERE = "0.0.0.0"  # noqa: S104  of the container, which publishes what its user says


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments of `afserve`; makes the key where there is none. Raises OSError."""
    if arguments:
        return list(arguments)
    key = Path(environment.get(STATE, _STATE)) / "api.key"
    make_key(key)
    words = ["up", "--host", _EVERYWHERE, "--api-key-file", str(key), "--admin-key-file", str(key)]
    return words if environment.get(CERTIFICATE) else [*words, "--insecure-http"]


def make_key(path: Path) -> None:
    """Once; whoever starts again has the same one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    key = secrets.token_urlsafe(24)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{key}\n")
    print(f"API key, printed this once and kept in {path}: {key}", flush=True)


def main() -> None:
    try:
        words = command(sys.argv[1:], os.environ)
    except OSError as error:
        sys.exit(
            f"error: {STATE}: the key cannot be written: {error}; mount a folder that this user may write"
        )
    os.execv(sys.executable, [*module("afserve"), *words])  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    main()
