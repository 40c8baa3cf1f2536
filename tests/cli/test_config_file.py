"""The file of `afserve up --config`: what --write-config writes gives the same run again, and what is refused."""

import pytest

from afserve.cli.main import run
from afserve.cli.up import GROUPS, asked_of, up
from afserve.errors import ConfigError
from afserve.settings import settings_of
from tests.launch.test_settings import other


def asked(*arguments):
    return asked_of(dict(up.make_context("up", list(arguments)).params))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_what_is_written_gives_the_same_run_again(group, tmp_path, monkeypatch):
    """Every setting of a group away from its default, one group at a time."""
    flags = ["--load-format", "dummy"]
    for one in settings_of(group):
        if one.name not in (
            "load_format",
            "prefix_caching",
            "kv_host",
            "kv_ssd",
            "kv_dtype",
            "kv_events",
            "models",
            "isa",
            "speculative_config",
        ):  # others depend on these
            value, text = other(one, tmp_path)
            flags += (
                [one.flag if value else one.flag.replace("--", "--no-")]
                if one.kind is bool
                else [one.flag, text]
            )
    assert run(["up", *flags, "--write-config", str(tmp_path / "up.toml")]) == 0
    assert asked("--config", str(tmp_path / "up.toml")) == asked(*flags)


def test_an_instruction_set_is_written_too(tmp_path):
    """It goes with the CPU alone, so the test above leaves it out."""
    assert run(["up", "--isa", "generic", "--write-config", str(tmp_path / "up.toml")]) == 0
    assert asked("--config", str(tmp_path / "up.toml")).wishes.engine.isa == "generic"


def test_words_of_json_are_written_too(tmp_path):
    words = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert run(["up", "--speculative-config", words, "--write-config", str(tmp_path / "up.toml")]) == 0
    assert asked("--config", str(tmp_path / "up.toml")).wishes.engine.speculative_config == words


def test_what_a_gpu_or_a_cache_of_prefixes_decides_is_written_too(tmp_path):
    """KV in 8 bits goes with the CPU alone, and events with prefixes."""
    flags = ["--kv-dtype", "int8", "--kv-events", "tcp://127.0.0.1:5557"]
    assert run(["up", *flags, "--write-config", str(tmp_path / "up.toml")]) == 0
    engine = asked("--config", str(tmp_path / "up.toml")).wishes.engine
    assert (engine.kv_dtype, engine.kv_events) == ("int8", "tcp://127.0.0.1:5557")


def test_a_model_named_first_is_the_same_as_the_flag(tmp_path, capsys):
    assert run(["up", "some/model", "--write-config", str(tmp_path / "a")]) == 0
    assert asked("--config", str(tmp_path / "a")).run.model == "some/model"
    assert run(["up", "one", "--model", "two", "--write-config", "-"]) == 2
    assert "--model two: one is named too" in capsys.readouterr().err


def test_text_that_toml_quotes_comes_back(tmp_path):
    command = 'ssh "a\\b"\n\tü\x7f'
    assert run(["up", "--ssh-command", command, "--write-config", str(tmp_path / "up.toml")]) == 0
    assert asked("--config", str(tmp_path / "up.toml")).run.ssh_command == command


def test_another_schema_and_unknown_keys_are_refused_by_name(tmp_path):
    file = tmp_path / "up.toml"
    for text, said in (
        ("schema = 2", "schema: 2 is not 1"),
        ("schema = true", "schema: True is not 1"),
        ("schema = 1\nkv-tokenz = 3", "kv_tokenz is not one of"),
        ("named = 'nano'", "named is not one of"),
        ("write-config = 'x'", "write_config is not one of"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            asked("--config", str(file))


@pytest.mark.parametrize("count", ["attention", "threads", "spare-slots", "kv-copies"])
@pytest.mark.parametrize("value", ["1.7", "1.0", "true", "'1.7'"])
def test_a_count_that_is_no_whole_number_is_refused(tmp_path, count, value, capsys):
    (tmp_path / "up.toml").write_text(f"{count} = {value}")
    assert run(["up", "--config", str(tmp_path / "up.toml"), "--write-config", "-"]) == 2
    assert count in capsys.readouterr().err.replace("_", "-")


def test_a_file_that_is_there_is_not_written_over(tmp_path, capsys):
    (tmp_path / "up.toml").write_text("mine")
    assert run(["up", "--write-config", str(tmp_path / "up.toml")]) == 2
    assert "give a new name" in capsys.readouterr().err and (tmp_path / "up.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-ssd-size", "1GiB"], "--kv-ssd-size: does nothing without --kv-ssd; add that, or drop it"),
        (["--ray-wait", "5"], "--ray-wait: does nothing without --ray"),
        (["--node-memory", "3"], "--node-memory: does nothing without --elsewhere"),
        (["--ssh-command", "ssh -v"], "--ssh-command: does nothing without --ssh"),
    ],
)
def test_an_option_that_does_nothing_without_another_one_is_refused(flags, said, capsys):
    assert run(["up", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_disk_tier_that_cannot_be_written_is_refused_at_start(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "kv"
    assert run(["up", "--model", "nano", "--load-format", "dummy", "--kv-ssd", str(folder)]) == 2
    assert f"--kv-ssd {folder}: " in capsys.readouterr().err
