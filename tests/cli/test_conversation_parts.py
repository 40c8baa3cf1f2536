"""What `afserve chat` is made of: /params, Markdown in blocks, and where history is kept."""

import io

import pytest
from rich.console import Console

from afserve.cli.chat.command import state_folder
from afserve.cli.chat.conversation import changed, told
from afserve.cli.chat.markdown import MarkdownText, split
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import RequestError


def test_params_are_changed_by_name_and_refused_by_name():
    params, unlimited = changed(SamplingParams(), True, "temperature=0.5 top_k=3 seed=4")
    assert (params.temperature, params.top_k, params.seed, unlimited) == (0.5, 3, 4, True)
    assert "max_tokens=none" in told(params, True) and "seed=4" in told(params, unlimited)
    params, unlimited = changed(params, True, "max_tokens=9 seed=none")
    assert (params.max_tokens, params.seed, unlimited) == (9, None, False)
    assert changed(params, False, "max_tokens=none")[1] and changed(params, False, "") == (params, False)
    for text, said in (
        ("tempreture=1", "tempreture"),
        ("top_k=x", "top_k=1"),
        ("top_p=2", "top_p"),
        ("top_p", "give a"),
    ):
        with pytest.raises(RequestError, match=said):
            changed(params, False, text)


def test_blocks_end_with_an_empty_line_outside_of_a_fence():
    assert split("a\nb") == ([], "a\nb")
    assert split("a\n\nb\n\nc") == (["a\n\n", "b\n\n"], "c")
    assert split("\n\na") == ([], "\n\na")
    code = "```py\nx = 1\n\ny = 2\n```\n\n"
    assert split(code + "z") == ([code], "z") and split(code[:-5]) == ([], code[:-5])


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_an_answer_is_rendered_however_it_comes(step, monkeypatch):
    text = "# Title\n\nSome **bold** text.\n\n```py\nx = 1\n\ny = 2\n```\n\n- one\n- two"
    out = io.StringIO()
    made = Console(file=out, width=60, force_terminal=False)
    monkeypatch.setattr("rich.console.Console", lambda: made)
    with MarkdownText() as shown:
        for at in range(0, len(text), step):
            shown.add(text[at : at + step])
    printed = out.getvalue()
    assert "Some bold text." in printed and "**" not in printed and "```" not in printed
    assert [printed.count(word) for word in ("Title", "x = 1", "y = 2", "• two")] == [1, 1, 1, 1]


def test_reasoning_is_shown_before_the_answer_and_apart(monkeypatch):
    out = io.StringIO()
    made = Console(file=out, width=60, force_terminal=False)
    monkeypatch.setattr("rich.console.Console", lambda: made)
    with MarkdownText() as shown:
        shown.think("Let me [see]")
        shown.think(".")
        shown.add("**Four**")
    assert [line.strip() for line in out.getvalue().splitlines() if line.strip()] == ["Let me [see].", "Four"]


def test_history_lies_where_the_user_keeps_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "afserve"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder().parts[-3:] == (".local", "state", "afserve")
