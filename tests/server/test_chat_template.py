"""Chat templates render as transformers renders them, and refuse in words."""

import json

import pytest

from afserve.errors import CheckpointError, RequestError
from afserve.tokens.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "it's <b>", "parameters": {"type": "object"}},
}
MESSAGES = [
    {"role": "system", "content": "be brief "},
    {"role": "user", "content": "a < b & 'c'?"},
    {"role": "assistant", "content": " yes "},
    {"role": "user", "content": "日本語"},
]
# The constructs that public templates use: trimming, namespaces, loop controls, tojson, generation blocks.
TEMPLATES = {
    "deepseek": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(sys='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}"
        "{% set ns.sys = m['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.sys }}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{%- elif m['role'] == 'assistant' and m['content'] is not none %}"
        "{{ '<｜Assistant｜>' + m['content'] + eos_token }}{%- endif %}{%- endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
    "controls": (
        "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "    {% if loop.index > 3 %}{% break %}{% endif %}\n[{{ m.role }}]"
        " {{ m.content | trim | tojson }}\n{% endfor %}"
    ),
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[-1].content }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y') | int > 2000 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
def test_same_as_transformers(name, tools, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, **SPECIAL
    )
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(MESSAGES, tools=tools, add_generation_prompt=prompt)
    assert ours == expected[0]


def test_continuing_the_last_message():
    template = ChatTemplate(TEMPLATES["deepseek"], SPECIAL)
    text = template.render(MESSAGES[:3], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<｜Assistant｜> yes ")


def test_file_before_field(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template.render(MESSAGES) == "plain" and template.render(MESSAGES, tools=[TOOL]) == "with tools"
    config.write_text(json.dumps({"chat_template": "field"}))
    assert ChatTemplate.from_folder(tmp_path).render(MESSAGES) == "field"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_folder(tmp_path).render(MESSAGES) == "file"


def test_extra_values_reach_the_template():
    template = ChatTemplate("{{ enable_thinking }}", {})
    assert template.render(MESSAGES, extra={"enable_thinking": False}) == "False"


def test_a_broken_template_names_its_line():
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
        "{{ 'a' + 1 }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_a_request_error(source):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, SPECIAL).render(MESSAGES)
    assert caught.value.param == "messages"
