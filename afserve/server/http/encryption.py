"""HTTPS: the certificate that clients see, read again when its file changes: it is renewed without a restart."""

import asyncio
import logging
import os
import ssl

from afserve.errors import ConfigError

log = logging.getLogger("afserve.server")
_LOOK_SECONDS = 1.0


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """Raises ConfigError where the two files are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {certfile}: cannot be used with the key in {keyfile}: {error}",
            param="ssl_certfile",
        ) from error
    return context


async def renew(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Until cancelled: whoever connects after the files have changed sees the new certificate."""
    seen = _stamps(certfile, keyfile)
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        now = _stamps(certfile, keyfile)
        if now == seen:
            continue
        seen = now
        try:
            server_context(certfile, keyfile)  # both files fit each other, before anything is changed
            context.load_cert_chain(certfile, keyfile)
            log.warning("%s was read again", certfile)
        except ConfigError as error:
            log.warning("%s; the certificate from before stays in use", error.message)


def _stamps(*paths: str) -> tuple[tuple[int, int] | None, ...]:
    """None for a file that is not there at the moment."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
