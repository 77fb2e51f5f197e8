"""Chat templates that write conversations as the families do that gyre knows, in few words: what is peculiar to each is there, their prose is not.

QWEN3 drops the reasoning before the last user's turn and joins the outputs of tools in one turn. HERMES has a system message of its own. CODER writes
calls in tags, strips texts, and refuses late system messages. OPENED is CODER with reasoning that the prompt opens. LLAMA3 moves the tools into
the first user's turn, has one call at a time and no text beside it. OTHER is nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.template import ChatTemplate

_ANSWERS = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
_TOLD = """\
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
"""
_TOOLS = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else DEFAULT) + '# Tools' -}}
{%- for t in tools -%}{{- '\\n' + (t | tojson) -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
"""
_JSON_CALLS = """\
{%- for c in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' -}}
{{- c.function.arguments if c.function.arguments is string else (c.function.arguments | tojson) -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\\n' -}}
"""

QWEN3 = (
    _TOOLS.replace("DEFAULT", "''")
    + """\
{%- set ns = namespace(last=messages | length - 1, seeking=true) -%}
{%- for m in messages[::-1] -%}
{%- if ns.seeking and m.role == 'user' and not m.content.startswith('<tool_response>') -%}
{%- set ns.seeking = false -%}{%- set ns.last = messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') -}}
{%- else -%}{{- m.content -}}{%- endif -%}
"""
    + _JSON_CALLS
    + _TOLD
    + "{%- endif -%}{%- endfor -%}"
    + _ANSWERS
)

HERMES = (
    _TOOLS.replace("DEFAULT", "'You are helpful.\\n\\n'")
    + """\
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' + m.content -}}
"""
    + _JSON_CALLS
    + _TOLD
    + "{%- endif -%}{%- endfor -%}"
    + _ANSWERS
)

CODER = (
    _TOOLS.replace("DEFAULT", "''")
    + """\
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- if not loop.first -%}{{- raise_exception('the system speaks first') -}}{%- endif -%}
{%- elif m.role == 'user' -%}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}THINK{{- m.content | trim -}}
{%- for c in m.tool_calls or [] -%}
{%- if not (loop.first and not m.content | trim) -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' -}}
{%- for key, value in c.function.arguments | items -%}
{{- '<parameter=' + key + '>\\n' -}}{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string -}}
{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
"""
    + _TOLD
    + "{%- endif -%}{%- endfor -%}"
    + _ANSWERS
)
OPENED = CODER.replace("THINK", "{{- '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' -}}")
OPENED = OPENED.replace(_ANSWERS, _ANSWERS.replace("assistant\\n", "assistant\\n<think>\\n"))
CODER = CODER.replace("THINK", "")

LLAMA3 = """\
{{- bos_token -}}
{%- set head = '<|start_header_id|>' -%}{%- set close = '<|end_header_id|>\\n\\n' -%}
{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- head + 'system' + close + 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' -}}
{%- if tools -%}
{{- head + 'user' + close -}}
{%- for t in tools -%}{{- (t | tojson(indent=4)) + '\\n\\n' -}}{%- endfor -%}
{{- messages[0].content | trim + '<|eot_id|>' -}}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- head + 'ipython' + close + (m.content | tojson) + '<|eot_id|>' -}}
{%- elif 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
{%- set f = m.tool_calls[0].function -%}
{{- head + 'assistant' + close + '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}<|eot_id|>' -}}
{%- else -%}{{- head + m.role + close + m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- head + 'assistant' + close -}}{%- endif -%}
"""

OTHER = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + ': ' + m.content -}}
{%- for c in m.tool_calls or [] -%}{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' -}}{%- endfor -%}{{- '<|endoftext|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant: ' -}}{%- endif -%}
"""

FAMILIES = {"qwen3": QWEN3, "hermes": HERMES, "coder": CODER, "opened": OPENED, "llama3": LLAMA3, "other": OTHER}


def make_family(make_model: Callable[..., Path], directory: Path, name: str) -> Renderer:
    """A renderer of a family, from files, as a model has them."""
    make_model(directory, FAMILIES[name])
    if name == "llama3":
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(f"<|{t}|>", special=True) for t in ("start_header_id", "end_header_id", "eot_id", "python_tag")])
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {"bos_token": "<|endoftext|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Renderer(ChatTemplate.load(directory))
