"""Files of a checkpoint folder that are not what they should be: each is refused by its name, at once."""

import json
import os
import tracemalloc

import pytest

from afserve import json_file
from afserve.cli.main import run
from afserve.cli.plan.catalog import load_model
from afserve.errors import CheckpointError, ConfigError
from afserve.families.table import load_spec
from afserve.json_file import CONFIG_BYTES, LIST_BYTES, read_object
from afserve.launch.plan.models import find_model
from afserve.models.shards import INDEX
from afserve.models.weights import Checkpoint
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer, eos_ids, special_tokens
from tests.patching import patch_library

BAD = {
    "not UTF-8": (b'{"a": "\xff"}', "is not UTF-8 text: invalid start byte at byte 7"),
    "empty": (b"", "cannot be read as JSON"),
    "cut": (b'{"a": ', "cannot be read as JSON"),
    "a list": (b"[]", "a JSON object was expected, found list"),
    "null": (b"null", "a JSON object was expected, found NoneType"),
    "deep": (b'{"a":' * 200_000, "nested too deeply"),
    "deep lists": (b"[" * 200_000, "nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "an integer has too many digits"),
}
READERS = {
    "config.json": load_spec,
    "generation_config.json": eos_ids,
    "tokenizer_config.json": special_tokens,
    "special_tokens_map.json": special_tokens,
    INDEX: Checkpoint,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_json_object(tmp_path, name, kind):
    data, complaint = BAD[kind]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        READERS[name](tmp_path)
    assert str(tmp_path / name) in caught.value.message and complaint in caught.value.message
    assert len(caught.value.message) < len(str(tmp_path)) + 200


@pytest.mark.parametrize("name", [*READERS, "tokenizer.json"])
def test_a_huge_file_is_refused_before_it_is_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)
    reader = READERS.get(name, Tokenizer.from_folder)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"has 1,099,511,627,776 bytes, at most"):
        reader(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link to nowhere", "a device"])
def test_what_is_no_plain_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "tokenizer_config.json"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"is not a plain file|no such file|Is a directory"):
        special_tokens(tmp_path)


def test_limits_hold_what_is_published():
    assert CONFIG_BYTES > 2 << 20 and LIST_BYTES > 40 << 20


@pytest.mark.parametrize("data", [value[0] for value in BAD.values()], ids=BAD)
def test_a_tokenizer_file_that_is_none(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer.json: " in caught.value.message


@pytest.mark.slow
def test_a_tokenizer_whose_rules_name_a_token_that_is_not_there(tmp_path):
    """The library panics when it encodes the first text, which would end the server at a request."""
    body = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {},
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (5, "chat_template: 5 is not the text of a template"),
        ({"default": "x"}, "chat_template: {'default': 'x'} is not the text"),
        (["x"], "chat_template[0]: 'x' is not an object with a name and a template"),
        (
            [{"name": "default"}],
            "chat_template[0]: {'name': 'default'} is not an object with a name and a template",
        ),
        ([{"template": "x"}], "chat_template[0]: {'template': 'x'} is not"),
        (
            [{"name": ["default"], "template": "x"}],
            "chat_template[0]: {'name': ['default'], 'template': 'x'} is not",
        ),
        (
            [{"name": "default", "template": "x"}, {"name": "tool_use", "template": 7}],
            "chat_template[1]: template: 7 is not the text of a template",
        ),
        ([None], "chat_template[0]: None is not an object"),
    ],
)
def test_a_malformed_chat_template(tmp_path, template, complaint):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate.from_folder(tmp_path)
    assert complaint in caught.value.message and "tokenizer_config.json" in caught.value.message


def test_a_chat_template_that_is_not_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not UTF-8"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize("value", ["2", 2.0, True, [1, "2"], [[1]], -1, 5000, 10**30, [0] * 2000, {}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ids_that_end_a_text_are_checked(tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    (tmp_path / name).write_text(json.dumps({"vocab_size": 5000, "eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{name}: eos_token_id: "):
        eos_ids(tmp_path)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        find_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize("kind", BAD)
def test_plan_names_the_file(tmp_path, kind, capsys):
    data, complaint = BAD[kind]
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError):
        load_model(str(tmp_path))
    assert run(["plan", "--model", str(tmp_path), "--pool", "h800=8"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(tmp_path) in said and complaint in said


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    seen = os.fstat

    def short(descriptor):
        found = seen(descriptor)
        return os.stat_result((*found[:6], 1, *found[7:]))

    patch_library(monkeypatch, json_file, "os", fstat=short)
    with pytest.raises(CheckpointError, match="grew beyond 3 bytes"):
        read_object(path, most=3)
