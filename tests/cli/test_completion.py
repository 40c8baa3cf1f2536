"""Shell completion: the scripts, and what they are answered."""

import pytest

from afserve.cli.main import run


@pytest.mark.parametrize("shell", ["zsh", "fish"])  # that of bash is made by asking bash for its version
def test_the_script_calls_afserve(shell, capsys):
    assert run(["completion", shell]) == 0
    assert f"_AFSERVE_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("afserve benc", "bench"),
        ("afserve bench serve --arriv", "--arrivals"),
        ("afserve up --transport sy", "symm"),
    ],
)
def test_commands_options_and_values_are_completed(typed, wanted, monkeypatch, capsys):
    monkeypatch.setenv("_AFSERVE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        run([])
    assert f"plain,{wanted}\n" in capsys.readouterr().out
