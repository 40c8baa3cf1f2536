"""Certificates as one end uses them: what is read, what is refused, and that a renewed one is used at once."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from afserve.errors import ConfigError
from afserve.launch.sites.authority import expires, issue, make_authority, subject_of
from afserve.tls import NODE_FILE, Certificates, CertifiedRole, check_exposed, is_loopback, lacks


def test_a_renewed_certificate_is_used_from_the_next_look_on(issued):
    folder = issued("expert")
    certificates = Certificates(folder)
    before, context = certificates.current(), certificates.server()
    assert certificates.current() is before and certificates.server() is context
    issue(folder.parent / "mine", subject_of(folder), folder, 0.5)
    assert certificates.current().certificate != before.certificate
    assert certificates.server() is not context


def test_what_cannot_be_read_later_is_said_and_the_last_one_stays(issued, caplog):
    folder = issued("expert")
    certificates = Certificates(folder)
    before = certificates.current()
    (folder / NODE_FILE).write_text("half a file")
    with caplog.at_level(logging.WARNING):
        assert certificates.current() is before
        assert certificates.current() is before
    assert len(caplog.records) == 1 and "the certificate from before stays in use" in caplog.text


def test_a_renewed_certificate_is_for_the_same_host(issued):
    folder = issued("expert", "attention", addresses=("10.1.2.3", "api.example.org"))
    was = subject_of(folder)
    issue(folder.parent / "mine", was, folder, 0.25)
    assert subject_of(folder) == was
    assert {str(role) for role in was.roles} == {"expert", "attention"}
    assert set(was.addresses) == {"10.1.2.3", "api.example.org"}
    assert expires(folder / NODE_FILE) < datetime.now(UTC) + timedelta(hours=7)


def test_a_key_that_others_may_read_is_refused(issued):
    folder = issued("expert")
    (folder / NODE_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by others .mode 644.; type: chmod 600"):
        Certificates(folder)


def test_files_that_are_not_there_or_no_certificates_are_named(issued, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"authority.pem: No such file or directory; `afserve certs issue`"):
        Certificates(tmp_path)
    folder = issued("expert")
    whole = (folder / NODE_FILE).read_bytes()
    (folder / NODE_FILE).write_bytes(whole.partition(b"-----BEGIN CERT")[0])
    with pytest.raises(ConfigError, match=r"node.pem is not a key followed by its certificate"):
        Certificates(folder)


def test_an_authority_is_never_replaced(issued):
    folder = issued("expert")
    with pytest.raises(ConfigError, match="exists; hosts trust it"):
        make_authority(folder.parent / "mine", 1)


@pytest.mark.parametrize("name", ["/proc/zz", "file", "x" * 300])
def test_a_folder_that_cannot_be_made_is_named(issued, tmp_path: Path, name: str):
    host = issued("expert")
    (tmp_path / "file").touch()
    folder = tmp_path / name
    with pytest.raises(ConfigError, match=f"{folder}/authority.key: cannot be written: "):
        make_authority(folder, 1)
    with pytest.raises(ConfigError, match=f"{folder}/authority.pem: cannot be written: "):
        issue(host.parent / "mine", subject_of(host), folder, 1)


def test_a_name_of_another_role_is_no_address(issued):
    with pytest.raises(ConfigError, match="stand for roles; give --role"):
        issued(addresses=("controller.afserve.internal",))


def test_names_stand_for_roles():
    names = ("attention.afserve.internal", "api.example.org")
    assert not lacks(names, CertifiedRole.ATTENTION)
    assert lacks(names, CertifiedRole.EXPERT).endswith("not for expert.afserve.internal")


@pytest.mark.parametrize(
    ("host", "mine"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("[::1]", True), ("localhost", True), ("10.0.0.1", False),
     ("0.0.0.0", False), ("::", False), ("there", False)],
)  # fmt: skip
def test_loopback(host: str, mine: bool):
    assert is_loopback(host) is mine


def test_plain_text_beyond_this_machine_has_to_be_asked_for(issued, caplog):
    check_exposed("--join", "127.0.0.1", None, insecure=False)
    check_exposed("--join", "10.0.0.1", issued("expert"), insecure=False)
    with pytest.raises(
        ConfigError, match=r"10.0.0.1 is beyond this machine.*--certs FOLDER.*--insecure-nodes"
    ):
        check_exposed("--join", "10.0.0.1", None, insecure=False)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_exposed("--join", "10.0.0.1", None, insecure=True)
    assert "prompts, answers and the run's token travel in plain text" in caplog.text
