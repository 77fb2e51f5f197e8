"""A conversation that grew is rendered from where it grew, to the text that Jinja alone would write: for each family, and for templates that look at
all there is to look at."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, models

from gyre.sandbox.gateway.resume import Mark
from gyre.sandbox.gateway.template import ChatTemplate, TemplateRefused

ROUND = "{% for m in messages %}BODY{{ m.role }}:{{ m.content }}{{ m.tool_calls | length }};{% endfor %}{{ messages | length }}"
LOCAL = {  # may go on: what a round reads is below the items that the mark knows, and as it was
    "plain": "",
    "last": "{% if loop.last %}!{% endif %}",
    "neighbours": "{{ (loop.previtem | default(m)).role }}{{ loop.nextitem.role if not loop.last }}{{ loop.index }}{{ loop.cycle('a', 'b') }}",
    "first": "{{ messages[0].content }}",
    "ahead": "{% if not loop.last and messages[loop.index].role == 'tool' %}+{% endif %}",
    "behind": "{% if not loop.first and messages[loop.index0 - 1].role == 'tool' %}-{% endif %}",
    "counter": "{% set ns.n = ns.n + 1 %}{{ ns.n }}",
    "seen": "{% if m.role == 'user' %}{% set ns.seen = true %}{% endif %}{% if ns.seen %}s{% endif %}",
    "alias": "{% set a = ns %}{% set a.n = a.n + 1 %}{{ ns['n'] }}",
    "shadow": "{{ x }}{% set x = loop.index %}{{ x }}",
    "skip": "{% if m.role == 'system' %}{% continue %}{% endif %}",
    "stop": "{% if m.content == 'b' %}{% break %}{% endif %}",
    "macro": "{{ f(m.role) }}",
    "reader": "{{ g() }}",
    "generation": "{% generation %}{{ m.content }}{% endgeneration %}",
    "outside": "{{ kinds[1] }}{{ names.a }}{{ 'tools' if tools }}",
    "inner": "{% for c in m.tool_calls or [] %}{{ c.id }}{{ loop.first }}{% if not loop.last %},{% endif %}{% endfor %}",
}
GLOBAL = {  # a later message may change what an earlier one is written as
    "length": "{{ loop.length }}",
    "left": "{{ loop.revindex }}",
    "size": "{{ messages | length }}",
    "latest": "{{ messages[-1].content }}",
    "beyond": "{{ (messages[loop.index + 1] | default(m)).role }}",
    "far": "{{ (messages[30] | default(m)).role }}",
    "passed": "{{ h(messages) }}",
    "counted": "{{ n }}",
    "looked": "{{ top.role }}",
    "all": "{% for other in messages %}{{ other.role[0] }}{% endfor %}",
    "slice": "{{ (messages[loop.index0:] | first).role }}{{ messages[1:][0].role }}",
    "changed": "{% if loop.changed(m.role) %}~{% endif %}",
    "joined": "{{ joined() }}",
    "nested": "{% set ns.inner = namespace(n=loop.index) %}{{ ns.inner.n }}",
    "rest": "{{ tail[0].content }}{{ tail[loop.index0 - 1].role }}",
}
HEAD = """\
{% set n = messages | length %}{% set top = messages[-1] %}{% set joined = joiner(',') %}{% set kinds = ['a', 'b'] %}{% set names = {'a': 1} %}
{% set ns = namespace(n=0, seen=false, late=messages[-1].role == 'user') %}{% set tail = messages[1:] %}
{% macro f(x) %}<{{ x }}{{ ns.n }}{{ kinds[0] }}>{% endmacro %}{% macro g() %}{{ messages[0].role }}{% endmacro %}
{% macro h(x) %}{{ x | length }}{% endmacro %}
"""
# what is wanted of `joiner` alone would keep every template from going on
SOURCES = {name: (HEAD if name == "joined" else HEAD.replace("{% set joined = joiner(',') %}", "")) + ROUND.replace("BODY", body)
           for name, body in (LOCAL | GLOBAL).items()}  # fmt: skip
SOURCES |= {
    "where": ROUND.replace("in messages", "in messages if m.role != 'system'").replace("BODY", "{{ loop.index }}"),
    "in a macro": "{% macro all() %}" + ROUND.replace("BODY", "") + "{% endmacro %}{{ all() }}",
    "in a set": "{% set text %}" + ROUND.replace("BODY", "") + "{% endset %}<{{ text }}>",
    "either": "{% if messages[-1].role == 'user' %}" + ROUND.replace("BODY", "u") + "{% else %}" + ROUND.replace("BODY", "x") + "{% endif %}",
    "late": HEAD.replace("{% set joined = joiner(',') %}", "") + ROUND.replace("BODY", "{% if ns.late and m.role == 'assistant' %}cut{% endif %}"),
    "backwards": ROUND.replace("in messages", "in messages[::-1]").replace("BODY", ""),
    "without the first": "{% set messages = messages[1:] %}" + ROUND.replace("BODY", "{{ messages[loop.index0].role }}"),
    "none": "{% for m in tools %}{{ m }}{% else %}no{% endfor %}",
    **FAMILIES,
}
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "tool"])
CALL = {"id": "i", "type": "function", "function": {"name": "t", "arguments": {"k": 1}}}
MESSAGE = st.builds(
    lambda role, content, calls: {"role": role, "content": content, **({"tool_calls": [CALL] * calls} if calls else {})},
    ROLE, st.sampled_from(["a", " b ", "b", ""]), st.sampled_from([0, 0, 1, 2]),
)  # fmt: skip
STEP = st.tuples(st.integers(0, 3), st.lists(MESSAGE, min_size=1, max_size=3))  # what is taken back, what is added
NOW = "2026"


def jinja_alone(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    environment.globals["strftime_now"] = lambda form: NOW
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(source)


def _raise(text: str) -> None:
    raise jinja2.TemplateError(text)


def make(source: str) -> ChatTemplate:
    template = ChatTemplate(Tokenizer(models.BPE()), source, {"bos_token": "<s>"})
    template._template.globals["strftime_now"] = lambda form: NOW  # type: ignore[index]
    return template


def read(template: ChatTemplate, messages: list[Any], tools: Any, marks: dict[int, Mark]) -> str | None:
    try:
        return template.render(messages, tools, reply_follows=True, marks=marks)
    except TemplateRefused:
        return None


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=40, deadline=None, database=None)
@given(steps=st.lists(STEP, min_size=2, max_size=8), tools=st.sampled_from([None, [{"name": "t"}, {"name": "u"}]]))
def test_the_text_is_that_of_the_whole(name: str, steps: list[Any], tools: Any) -> None:
    template, whole = make(SOURCES[name]), jinja_alone(SOURCES[name])
    messages: list[Any] = []
    marks: dict[int, Mark] = {}
    for n_back, more in steps:
        messages = [*messages[: max(0, len(messages) - n_back)], *more]
        try:
            wanted = whole.render(messages=messages, tools=tools, documents=None, add_generation_prompt=True, bos_token="<s>")
        except (jinja2.TemplateError, TypeError):
            wanted = None
        assert read(template, messages, tools, marks) == wanted


def rounds(template: ChatTemplate) -> int:
    """Rounds of the last loop when twenty messages, seen before, go on with two."""
    messages = [{"role": ("user", "assistant", "tool")[min(i, 1 + i % 2)], "content": f"c{i}"} for i in range(22)]
    marks: dict[int, Mark] = {}
    n = 0

    class Counted(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal n
            n += key == "content"
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            return super().get(key, default)

    seen = [Counted(m) for m in messages]
    assert read(template, seen[:20], None, marks) is not None
    n = 0
    assert read(template, seen, None, marks) is not None
    return n


@pytest.mark.parametrize(
    "name", ["plain", *(n for n in LOCAL if n not in ("stop", "first", "reader")), "qwen3", "hermes", "other", "without the first"]
)
def test_what_was_written_is_not_written_again(name: str) -> None:
    assert rounds(make(SOURCES[name])) < 20


@pytest.mark.parametrize("name", [*GLOBAL, "where", "in a macro", "in a set"])
def test_what_later_messages_may_change_is_written_again(name: str) -> None:
    assert rounds(make(SOURCES[name])) >= 20
