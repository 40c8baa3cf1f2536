"""A deployment's private authority: makes it, and issues and renews the certificates of its hosts.

Files in, files out; `afserve certs` is the command. It needs the package `cryptography` (`pip install afserve[tls]`).
Who uses the certificates is in `tls`.
"""

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from afserve.errors import ConfigError
from afserve.settings import in_range
from afserve.tls import AUTHORITY_FILE, DOMAIN, NODE_FILE, CertifiedRole

KEY_FILE = "authority.key"
MOST_DAYS = 36_500
_EARLY = timedelta(minutes=5)  # clocks of hosts differ


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose certificate: a name for logs, the roles that this host may have, and names and addresses for HTTPS."""

    name: str
    roles: tuple[CertifiedRole, ...]
    addresses: tuple[str, ...] = ()


def make_authority(folder: Path, days: int) -> Path:
    """A new key and its certificate in `folder`. Raises ConfigError where there is one already."""
    x509, hashes, ec, serialization = _library()
    in_range("--days", days, 1, MOST_DAYS)
    if os.path.exists(folder / KEY_FILE):
        raise ConfigError(
            f"certs init: {folder / KEY_FILE} exists; hosts trust it, so it is not replaced: give another folder",
            param="folder",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority of {DOMAIN}")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(x509, signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / KEY_FILE, _key_pem(key, serialization), 0o600)
    _write(folder / AUTHORITY_FILE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return folder / AUTHORITY_FILE


def issue(authority: Path, subject: Subject, out: Path, days: float, now: datetime | None = None) -> Path:
    """Key and certificate for one host in `out`, with the authority's certificate beside them.

    It is valid from `now` on. A certificate that is there is replaced in one step. Raises ConfigError where the
    authority cannot be used.
    """
    x509, hashes, ec, serialization = _library()
    in_range("--days", days, 0.001, MOST_DAYS)
    signer, signed = _authority(authority, x509, serialization)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(role.dns) for role in subject.roles]
    names += [_general_name(x509, text) for text in subject.addresses]
    if not names:
        raise ConfigError("certs issue: a certificate is for a --role or for an --address", param="role")
    now = now or datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _checked(subject.name))]))
        .issuer_name(signed.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(min(now + timedelta(days=days), signed.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(x509, signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    _write(out / AUTHORITY_FILE, signed.public_bytes(pem), 0o644)
    _write(out / NODE_FILE, _key_pem(key, serialization) + certificate.public_bytes(pem), 0o600)
    return out / NODE_FILE


def subject_of(folder: Path) -> Subject:
    """Whom the certificate in `folder` is for. Raises ConfigError where there is none."""
    x509 = _library()[0]
    path = folder / NODE_FILE
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"certs renew: {path}: is no certificate of afserve's: {error}", param="folder"
        ) from error
    dns = names.get_values_for_type(x509.DNSName)
    by_name = {role.dns: role for role in CertifiedRole}
    others = [name for name in dns if name not in by_name]
    others += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    (common,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return Subject(str(common.value), tuple(by_name[n] for n in dns if n in by_name), tuple(others))


def expires(path: Path) -> datetime:
    """When the certificate in a PEM file ends."""
    found: datetime = _library()[0].load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return found


def roles_of(texts: Iterable[str]) -> tuple[CertifiedRole, ...]:
    return tuple(dict.fromkeys(CertifiedRole(text) for text in texts))


def _library() -> Any:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            f"certs: needs the package cryptography ({error}); pip install 'afserve[tls]'"
        ) from error
    return x509, hashes, ec, serialization


def _authority(folder: Path, x509: Any, serialization: Any) -> tuple[Any, Any]:
    """Its key and its certificate."""
    try:
        key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), password=None)
        return key, x509.load_pem_x509_certificate((folder / AUTHORITY_FILE).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--authority {folder}: {error}; `afserve certs init {folder}` makes one"
        ) from error


def _usage(x509: Any, *, signs: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(x509: Any, text: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if text.endswith(DOMAIN):
        raise ConfigError(f"--address {text}: names of {DOMAIN} stand for roles; give --role")
    return x509.DNSName(_checked(text))


def _checked(text: str) -> str:
    if not text or len(text) > 64 or not text.isascii() or any(c.isspace() or c in "/\\\0" for c in text):
        raise ConfigError(f"certs: {text!r} is not a name of at most 64 letters, digits, dots and dashes")
    return text


def _key_pem(key: Any, serialization: Any) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whoever reads sees the old bytes or the new ones. Makes the folder. Raises ConfigError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"certs: {path}: cannot be written: {error.strerror or error}") from error


def as_text(roles: Sequence[CertifiedRole]) -> str:
    return ", ".join(roles)
