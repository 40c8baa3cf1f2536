"""`afserve up --help`: the common settings, and every setting under exactly one topic."""

import re

import pytest

from afserve.cli.main import run
from afserve.cli.topics import EVERYTHING
from afserve.cli.up import GROUPS, up
from afserve.settings import TOPICS, settings_of

DECLARED = [one for group in GROUPS for one in settings_of(group)]


def helped(capsys, *arguments):
    assert run(["up", "--help", *arguments]) == 0
    return capsys.readouterr().out


def flags(text):
    return set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE))


def test_every_setting_has_a_topic_and_every_topic_settings():
    assert {one.topic for one in DECLARED} == set(TOPICS)


def test_the_first_help_shows_the_common_settings_and_the_names_of_the_topics(capsys):
    shown = helped(capsys)
    common = {one.flag for one in DECLARED if one.common}
    assert flags(shown) == common | {"--config", "--write-config", "--help"}
    assert 15 <= len(common) <= 25 and len(shown.splitlines()) < 80
    assert all(re.search(rf"^  {topic} +\S", shown, re.MULTILINE) for topic in TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_shows_its_settings(topic, capsys):
    assert flags(helped(capsys, topic)) == {one.flag for one in DECLARED if one.topic == topic}


def test_all_shows_every_flag_once(capsys):
    shown = helped(capsys, EVERYTHING)
    listed = re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)
    assert sorted(listed) == sorted([one.flag for one in DECLARED] + ["--config", "--write-config", "--help"])


def test_an_unknown_topic_is_refused_with_the_known_ones(capsys):
    assert run(["up", "--help", "kw"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: --help 'kw': is not one of {', '.join([*TOPICS, EVERYTHING])}\n"


def test_a_shell_completes_topics():
    option = up.get_help_option(up.make_context("up", [], resilient_parsing=True))
    found = option.shell_complete(up.make_context("up", [], resilient_parsing=True), "l")
    assert [one.value for one in found] == ["losses", "limits", "logs"]
