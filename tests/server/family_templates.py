"""Chat templates with the turns of each model family: what their own templates write, and little else."""

_CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}%TURN%{%- else %}{{- m.content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}{#- tools -#}"""

_QWEN_THOUGHT = (
    "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
)

HERMES = _CHATML.replace(
    "%TURN%",
    _QWEN_THOUGHT
    + """{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}""",
)

QWEN_XML = _CHATML.replace(
    "%TURN%",
    _QWEN_THOUGHT
    + """{%- if m.content %}{{- m.content + '\\n' }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' }}
{{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
)

GLM = """[gMASK]<sop>{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}
{{- '<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}
{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- else %}{{- m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}{#- tools -#}"""

MINIMAX = """{%- for m in messages %}
{{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' }}
{%- if m.role == 'assistant' %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + (m.content or '') }}
{%- if m.tool_calls %}
{{- '\\n<minimax:tool_call>\\n' }}
{%- for c in m.tool_calls %}
{{- '<invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter name="' + k + '">' }}{{ v if v is string else v | tojson | string }}{{ '</parameter>' }}
{%- endfor %}
{{- '</invoke>\\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}
{%- endif %}
{%- else %}{{- m.content }}{%- endif %}
{{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}{#- tools -#}"""

KIMI = """{%- for m in messages %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'assistant' %}
{{- '<think>' + (m.reasoning_content or '') + '</think>' + (m.content or '') }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}{{- m.content }}{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}{#- tools -#}"""

_DEEPSEEK = """{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + '%THOUGHT%' + (m.content or '') }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}%CALL%{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>%THOUGHT%' }}{%- endif %}{#- tools -#}"""

# Both write the arguments as a text.
DEEPSEEK_V3 = _DEEPSEEK.replace("%THOUGHT%", "").replace(
    "%CALL%",
    """{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}""",
)
DEEPSEEK_V31 = _DEEPSEEK.replace("%THOUGHT%", "</think>").replace(
    "%CALL%",
    "{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}"
    "{{- c.function.arguments + '<｜tool▁call▁end｜>' }}",
)

_MISTRAL = """{{- '<s>' }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content or '' }}{%- if m.tool_calls %}%CALLS%{%- endif %}{{- '</s>' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}{#- tools -#}"""
_NINE = """{%- if c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}"""
MISTRAL_LIST = _MISTRAL.replace(
    "%CALLS%",
    f"""{{{{- '[TOOL_CALLS] [' }}}}
{{%- for c in m.tool_calls %}}{_NINE}
{{{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}}' }}}}{{{{ ', ' if not loop.last else ']' }}}}
{{%- endfor %}}""",
)
MISTRAL_V11 = _MISTRAL.replace(
    "%CALLS%",
    f"""{{%- for c in m.tool_calls %}}{_NINE}
{{{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}}}
{{%- endfor %}}""",
)
MISTRAL_V13 = _MISTRAL.replace(
    "%CALLS%",
    "{%- for c in m.tool_calls %}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{%- endfor %}",
)

_LISTED = """{%- for c in m.tool_calls %}
{{- ('[' if loop.first else ', ') + '{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}' }}{{ ']' if loop.last else '' }}
{%- endfor %}"""
GRANITE = _CHATML.replace(
    "%TURN%", "{{- m.content or '' }}{%- if m.tool_calls %}{{- '<|tool_call|>' }}" + _LISTED + "{%- endif %}"
)
HUNYUAN = _CHATML.replace(
    "%TURN%",
    "{{- m.content or '' }}{%- if m.tool_calls %}{{- '<tool_calls>' }}"
    + _LISTED
    + "{{- '</tool_calls>' }}{%- endif %}",
)

HARMONY = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls and m.content %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}
{{- c.function.arguments | tojson }}{{ '<|call|>' }}
{%- endfor %}
{%- if not m.tool_calls %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{%- endif %}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + (m.content or '') + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}{#- tools -#}"""

# Texts stand between quotes as they are.
LFM2 = _CHATML.replace(
    "%TURN%",
    """{{- m.content or '' }}
{%- if m.tool_calls %}{{- '<|tool_call_start|>[' }}
{%- for c in m.tool_calls %}
{{- c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}
{{- k + '=' }}{{ "'" + v + "'" if v is string else v | tojson if v is mapping else v | string }}
{{- ', ' if not loop.last }}
{%- endfor %}
{{- ')' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']<|tool_call_end|>' }}{%- endif %}""",
)

GEMMA = """{%- macro told(v) %}
{%- if v is string %}{{- '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean %}{{- 'true' if v else 'false' }}
{%- elif v is mapping %}{{- '{' }}
{%- for k, x in v | dictsort %}{{- (',' if not loop.first else '') + k + ':' + told(x) }}{%- endfor %}{{- '}' }}
{%- elif v is sequence %}{{- '[' }}
{%- for x in v %}{{- (',' if not loop.first else '') + told(x) }}{%- endfor %}{{- ']' }}
{%- else %}{{- v }}
{%- endif %}
{%- endmacro %}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- if m.reasoning_content and m.tool_calls %}
{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}
{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' + c.function.name + told(c.function.arguments) + '<tool_call|>' }}
{%- endfor %}
{{- (m.content or '') | trim }}
{{- '<|tool_response>' if m.tool_calls else '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{%- endif %}{#- tools -#}"""

LAGUNA = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<assistant>\n<think>\n' + (m.reasoning_content or '') + '\n</think>\n' }}
{%- if m.content %}{{- m.content + '\n' }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + c.function.name + '\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>\n' }}
{%- endfor %}
{{- '</assistant>\n' }}
{%- else %}{{- '<' + m.role + '>\n' + m.content + '\n</' + m.role + '>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>\n<think>' }}{%- endif %}{#- tools -#}"""

# With calls it writes no words.
COHERE = """{%- for m in messages %}
{{- '<|START_OF_TURN_TOKEN|>' }}
{%- if m.role == 'assistant' %}
{{- '<|CHATBOT_TOKEN|><|START_THINKING|>' + (m.reasoning_content or '') + '<|END_THINKING|>' }}
{%- if m.tool_calls %}{{- '<|START_ACTION|>[' }}
{%- for c in m.tool_calls %}
{{- '\n    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson }}{{ '}' if loop.last else '},' }}
{%- endfor %}
{{- '\n]<|END_ACTION|>' }}
{%- else %}{{- '<|START_TEXT|>' + m.content + '<|END_TEXT|>' }}
{%- endif %}
{%- else %}{{- '<|USER_TOKEN|><|START_TEXT|>' + m.content + '<|END_TEXT|>' }}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>' }}{%- endif %}
{#- tools -#}"""

# Reasoning and calls in tags of its own; a token tells how much is to be thought.
HY3 = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<｜hy_Assistant:opensource｜><think:opensource>' + (m.reasoning_content or '') }}
{{- '</think:opensource>' + (m.content or '') }}
{%- if m.tool_calls %}{{- '<tool_calls:opensource>\n' }}
{%- for c in m.tool_calls %}
{{- '<tool_call:opensource>' + c.function.name + '<tool_sep:opensource>\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key:opensource>' + k + '</arg_key:opensource>\n<arg_value:opensource>' }}
{{- v if v is string else v | tojson }}{{ '</arg_value:opensource>\n' }}
{%- endfor %}
{{- '</tool_call:opensource>\n' }}
{%- endfor %}
{{- '</tool_calls:opensource>' }}{%- endif %}
{{- '<｜hy_eos:opensource｜>' }}
{%- else %}{{- '<｜hy_User:opensource｜>' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜hy_Assistant:opensource｜><think:opensource>' }}{%- endif %}{#- tools -#}"""

# The template, its form of calls, what ends a turn, and the white space between words and calls.
FAMILIES = {
    "hermes": (HERMES, "hermes", "<|im_end|>\n", "\n"),
    "qwen3-coder": (QWEN_XML, "qwen-xml", "<|im_end|>\n", "\n\n"),
    "glm-4.5": (GLM, "glm", "", "\n"),
    "minimax-m2": (MINIMAX, "minimax", "[e~[\n", "\n"),
    "kimi-k2": (KIMI, "kimi", "<|im_end|>", ""),
    "deepseek-v3": (DEEPSEEK_V3, "deepseek", "<｜end▁of▁sentence｜>", ""),
    "deepseek-v3.1": (DEEPSEEK_V31, "deepseek", "<｜end▁of▁sentence｜>", ""),
    "mistral": (MISTRAL_LIST, "mistral", "</s>", ""),
    "mistral-v11": (MISTRAL_V11, "mistral", "</s>", ""),
    "mistral-v13": (MISTRAL_V13, "mistral", "</s>", ""),
    "granite": (GRANITE, "granite", "<|im_end|>\n", ""),
    "hunyuan": (HUNYUAN, "hunyuan", "<|im_end|>\n", ""),
    "gpt-oss": (HARMONY, "channels", "", ""),
    "lfm2": (LFM2, "lfm2", "<|im_end|>\n", ""),
    "gemma-4": (GEMMA, "gemma", "<|tool_response>", ""),
    "laguna": (LAGUNA, "glm", "</assistant>\n", "\n"),
    "hy3": (HY3, "hy3", "<｜hy_eos:opensource｜>", ""),
    "command-a-plus": (COHERE, "cohere", "<|END_OF_TURN_TOKEN|>", ""),
}
