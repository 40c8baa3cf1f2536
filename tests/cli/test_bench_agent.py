"""`afserve bench agent` against a scripted server on a socket: what each turn sends, and what is told of it."""

import json

import pytest
from click.testing import CliRunner

from afserve.cli.bench.agent import AgentHeard, agent, in_words, told
from afserve.cli.load.heard import COMPLETED
from afserve.cli.load.sessions import SessionShape, drawn_sessions, recorded_sessions
from afserve.errors import ConfigError, PeerLost
from bench.scripted_server import Script, serving

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
RECORDED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"}, CALL,
        {"role": "tool", "tool_call_id": "c", "content": "r"}, {"role": "assistant", "content": "recorded"},
        {"role": "user", "content": "thanks"},
    ],
    "think": [0, 0.01], "output_tokens": [3, 2],
}  # fmt: skip


def ran(url, *arguments):
    done = CliRunner().invoke(agent, ["--url", url, "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_recorded_session_is_replayed_turn_by_turn(tmp_path):
    file = tmp_path / "sessions.jsonl"
    file.write_text(json.dumps(RECORDED) + "\n")
    script = Script()
    with serving(script) as url:
        row = ran(
            url,
            "--sessions",
            str(file),
            "--output-len",
            "4",
            "--retain",
            "60",
            "--out",
            str(tmp_path / "rows"),
        )
    chats = [body["messages"] for body in script.bodies]
    assert [len(chat) for chat in chats] == [2, 4, 6] and [body["max_tokens"] for body in script.bodies] == [
        3,
        2,
        4,
    ]
    assert chats[1][2] == CALL and chats[1][:2] == chats[0]
    own = chats[2][4]
    assert own["role"] == "assistant" and own["content"] and own["content"] != "recorded", (
        "the model's own words"
    )
    assert all(body["tools"] == RECORDED["tools"] and body["retain"] == 60 for body in script.bodies)
    assert row["completed"] == 3 and [one["turn"] for one in row["by_turn"]] == [1, 2, 3]
    assert row["tokens_per_s_p90"] > 0 and row["found"] == 0
    assert json.loads((tmp_path / "rows").read_text()) == row


def test_drawn_sessions_are_of_one_agent_and_grow():
    shape = SessionShape(think=0.5).scaled(0.05)
    one, other = drawn_sessions(shape, 2, 7)
    assert one == next(drawn_sessions(shape, 1, 7)) and one != other
    assert (
        one.turns[0].said[0] == other.turns[0].said[0] and len(one.turns[0].said[0]["content"].split()) == 200
    )
    assert len(one.turns) == 10 and one.turns[0].think == 0 < one.turns[1].think
    means = [
        sum(len(str(m["content"]).split()) for turn in s.turns for m in turn.said)
        for s in drawn_sessions(shape, 40, 1)
    ]
    assert sum(means) / 40 == pytest.approx(200 + 20 + 9 * 37, rel=0.05)


def test_a_session_ends_where_a_turn_has_no_answer():
    script = Script(errors={1: 429})
    with serving(script) as url:
        row = ran(url, "--count", "2", "--at-once", "1", "--turns", "3", "--scale", "0.01", "--think", "0")
    assert row["refused"] == 1 and row["sent"] == 5 and row["by_turn"][0]["answers"] == 2
    with (
        serving(Script(errors=dict.fromkeys(range(9), 500))) as url,
        pytest.raises(PeerLost, match="not one request"),
    ):
        ran(url, "--count", "1", "--turns", "1", "--scale", "0.01")


def heard(turn, prompt, cached, seconds=1.0, tokens=10):
    return AgentHeard(
        0.0, tokens, ended=seconds, pieces=[0.5], prompt_tokens=prompt, usage_tokens=tokens, outcome=COMPLETED,
        turn=turn, cached_tokens=cached,
    )  # fmt: skip


def test_figures_are_of_what_was_heard():
    found = told([heard(1, 100, 0), heard(2, 120, 90, 3.0), heard(2, 80, 70)])
    assert found["found"] == round(160 / 300, 4) and found["found_later"] == 0.8
    assert found["tokens_per_s_p90"] == round(1 / 0.26, 3), "nine of ten tokens come in 0.26 s or less"
    assert found["by_turn"][1] == {
        "turn": 2,
        "answers": 2,
        "ttft_ms": {"p50": 500.0, "p90": 500.0},
        "found": 0.8,
    }
    said = in_words({"completed": 3, "sent": 3, **found})
    assert "53.3 %, from the second turn on 80.0 %" in said[2]
    many = told([heard(turn, 10, 0) for turn in range(1, 16)])
    assert in_words({"completed": 15, "sent": 15, **many})[-1] == "and 3 more turns, which --json shows"
    assert told([])["found"] is None and told([])["tokens_per_s_p90"] is None


def test_cached_tokens_and_words_come_from_the_stream():
    one = AgentHeard(0.0, 4)
    one.event(b'{"choices": [{"delta": {"content": "a"}}]}', 1.0)
    one.event(b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, '
              b'"prompt_tokens_details": {"cached_tokens": 8}}}', 2.0)  # fmt: skip
    assert one.event(b"[DONE]", 3.0) and (one.words, one.cached_tokens, one.prompt_tokens) == (["a"], 8, 9)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: not JSON"),
        ("[]", '"messages" is no list of objects'),
        ('{"messages": [1]}', '"messages" is no list of objects'),
        ('{"messages": []}', "has 0 turns"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "has nothing before it"),
        ('{"messages": [{"role": "user"}], "think": [-1]}', '"think" is no list of numbers'),
        ('{"messages": [{"role": "user"}], "output_tokens": "x"}', '"output_tokens" is no list'),
        ("", "holds no session"),
    ],
)
def test_what_is_no_session_is_named(tmp_path, line, words):
    file = tmp_path / "s"
    file.write_text(line)
    with pytest.raises(ConfigError, match="--sessions") as refused:
        recorded_sessions(file, 5)
    assert words in str(refused.value)
