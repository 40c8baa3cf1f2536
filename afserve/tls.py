"""The certificates by which nodes know each other: one folder per host, read again whenever a connection is made.

`authority.pem` is the deployment's own authority, `node.pem` this host's key and certificate in one file, so that a
renewed one takes its place in one step. A certificate names the roles that its host may have, as DNS names such as
`expert.afserve.internal`; who connects asks for the role, never for an address. Nothing here issues one
(`launch/sites/authority` does), and nothing needs more than Python's own ssl.
"""

import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from afserve.errors import AuthError, ConfigError

log = logging.getLogger("afserve.tls")
AUTHORITY_FILE = "authority.pem"
NODE_FILE = "node.pem"
DOMAIN = "afserve.internal"  # a name that no public authority may certify
_REFUSED = "it refuses the certificate in --certs; is it of the same authority, and still valid?"
_KEY_END = b"-----END PRIVATE KEY-----"


class CertifiedRole(StrEnum):
    """What a certificate may be for. A controller's host is the one that runs `afserve up`."""

    CONTROLLER = "controller"
    GATEWAY = "gateway"
    ATTENTION = "attention"
    EXPERT = "expert"

    @property
    def dns(self) -> str:
        return f"{self.value}.{DOMAIN}"


@dataclass(frozen=True, slots=True)
class Pems:
    """The bytes of one moment: authority, this host's key, and its certificate."""

    authority: bytes
    key: bytes
    certificate: bytes


class Certificates:
    """A folder of certificates. What cannot be read later on is said, and the last good ones stay in use."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where a file is missing, is not what it should be, or others may read the key."""
        self.folder = folder
        self._seen = self._stamps()
        self.pems = self._read()
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self._lock = threading.Lock()  # diallers, acceptors and gRPC ask from threads of their own

    def current(self) -> Pems:
        """What is in the folder now, read again only where its files have changed since the last look."""
        with self._lock:
            self._look()
            return self.pems

    def server(self) -> ssl.SSLContext:
        """For the end that is dialled: it asks for a certificate of the same authority."""
        return self._context(server=True)

    def client(self) -> ssl.SSLContext:
        """For the end that dials; `server_hostname` is the role that must answer."""
        return self._context(server=False)

    def new_client(self) -> ssl.SSLContext:
        """The same, for the caller alone to change."""
        with self._lock:
            self._look()
            return self._new_context(server=False)

    def _look(self) -> None:
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return
            self._seen = stamps
            self.pems = self._read()
        except ConfigError as error:
            log.warning("%s; the certificate from before stays in use", error.message)
            return
        self._contexts.clear()

    def _context(self, *, server: bool) -> ssl.SSLContext:
        with self._lock:
            self._look()
            if server not in self._contexts:
                self._contexts[server] = self._new_context(server=server)
            return self._contexts[server]

    def _new_context(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.pems.authority.decode())
        context.load_cert_chain(self.folder / NODE_FILE)
        if server:
            context.num_tickets = 0  # nothing is resumed: each connection shows its certificate
        return context

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        try:
            found = [os.stat(self.folder / name) for name in (AUTHORITY_FILE, NODE_FILE)]
        except OSError as error:
            raise ConfigError(
                f"--certs {self.folder}: {error.filename}: {error.strerror}; `afserve certs issue` writes it"
            ) from error
        return tuple((one.st_mtime_ns, one.st_ino) for one in found)

    def _read(self) -> Pems:
        try:
            _check_private(self.folder / NODE_FILE)
            authority = (self.folder / AUTHORITY_FILE).read_bytes()
            key, end, certificate = (self.folder / NODE_FILE).read_bytes().partition(_KEY_END)
            pems = Pems(authority, key + end + b"\n", certificate.lstrip())
            if not end or b"BEGIN CERTIFICATE" not in certificate:
                raise ConfigError(
                    f"--certs {self.folder}: {NODE_FILE} is not a key followed by its certificate"
                )
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authority.decode())
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.folder / NODE_FILE)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--certs {self.folder}: is not usable: {error}") from error
        return pems


def opened(folder: Path | str | None) -> Certificates | None:
    return Certificates(Path(folder)) if folder else None


def lacks(names: Iterable[str], role: CertifiedRole) -> str:
    """Why a certificate with these names is not one of `role`; empty where it is."""
    found = sorted(names)
    if role.dns in found:
        return ""
    return f"its certificate is for {', '.join(found) or 'no role'}, not for {role.dns}"


def probe(address: str, certificates: Certificates, role: CertifiedRole, seconds: float = 5.0) -> None:
    """Shakes hands with a gRPC server once. Raises AuthError where either end refuses the other's certificate.

    gRPC itself only says that nobody is there. Where nobody is, this says nothing.
    """
    host, _, port = address.rpartition(":")
    context = certificates.new_client()
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), seconds) as plain,
            context.wrap_socket(plain, server_hostname=role.dns) as connection,
        ):
            _await_verdict(connection, f"{address} as {role.dns}")
    except ssl.SSLError as error:
        raise AuthError(f"{address} as {role.dns}: {why_refused(error)}") from error
    except OSError:
        return


def _await_verdict(connection: ssl.SSLSocket, who: str) -> None:
    """What the other end thinks of our certificate comes after the handshake: its first words, or the end."""
    try:
        accepted = bool(connection.recv(1))
    except ConnectionError:
        accepted = False
    if not accepted:
        raise AuthError(f"{who}: {_REFUSED}")


def why_refused(error: ssl.SSLError) -> str:
    """For people, with what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused here: {error.verify_message}"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason:
        return f"{_REFUSED} ({reason})"
    if "wrong version" in reason or "record" in reason or "http request" in reason:
        return f"it does not speak TLS ({reason}); was it started without --certs?"
    return f"TLS failed: {reason}"


def is_loopback(host: str) -> bool:
    """Whether only users of this machine reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposed(what: str, host: str, certificates: "Certificates | Path | None", insecure: bool) -> None:
    """Raises ConfigError where nodes would talk in plain text beyond this machine and nobody has said that they may."""
    if certificates is not None or is_loopback(host):
        return
    if not insecure:
        raise ConfigError(
            f"{what}: {host} is beyond this machine, and without certificates everyone on the way reads prompts, "
            "answers and the run's token; give --certs FOLDER (see `afserve certs`), or --insecure-nodes on a "
            "network of your own",
            param="certs",
        )
    log.warning(
        "%s: %s: --insecure-nodes: prompts, answers and the run's token travel in plain text, and whoever reaches a "
        "node's data port can send it rows; keep other machines off this network",
        what,
        host,
    )


def _check_private(path: Path) -> None:
    """A group may read it where it is another user's: that is how secrets are handed to a container."""
    found = os.stat(path)
    mine = found.st_uid == os.geteuid()
    if found.st_mode & (0o077 if mine else 0o007):
        raise ConfigError(
            f"--certs: {path} holds a key and can be read by others (mode {stat.S_IMODE(found.st_mode):03o}); type: "
            f"chmod 600 {path}"
        )
