"""Files that people name: read whole up to a limit, whatever they are."""

import os
import threading

import pytest

from afserve.cli.connection import key_of
from afserve.cli.options import read_given_bytes, read_given_text, read_given_toml
from afserve.errors import ConfigError


def test_a_file_and_a_pipe_are_read_up_to_the_limit(tmp_path):
    plain, pipe = tmp_path / "plain", tmp_path / "pipe"
    plain.write_bytes(b"12345678")
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"12345678",))
    writer.start()
    assert read_given_bytes(plain, "--x", 8) == read_given_bytes(pipe, "--x", 8) == b"12345678"
    writer.join(10)
    with pytest.raises(ConfigError, match=r"^--x plain: has more than 7 bytes"):
        read_given_bytes(plain, "--x plain", 7)


def test_what_has_no_end_or_is_larger_than_memory_is_refused_without_being_read(tmp_path):
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    for path in (sparse, "/dev/zero"):
        with pytest.raises(ConfigError, match="has more than 4,096 bytes"):
            read_given_bytes(type(sparse)(path), "--x", 4096)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "^--x: is not UTF-8 text: invalid start byte at byte 0"),
        (b"a = [", "^--x: Invalid value"),
        (b"a = " + b"[" * 100_000, "^--x: "),
    ],
)
def test_what_is_no_text_or_no_toml_is_named(tmp_path, data, words):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_given_toml(tmp_path / "f", "--x")


@pytest.mark.parametrize(("data", "words"), [(b"\xff", "is not UTF-8 text"), (b" \n", "is empty")])
def test_a_key_file_without_a_key_is_named(tmp_path, data, words):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ConfigError, match=f"^--api-key-file .*f: {words}"):
        key_of(str(tmp_path / "f"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone: cannot be read: No such file"):
        read_given_text(tmp_path / "gone", str(tmp_path / "gone"))
