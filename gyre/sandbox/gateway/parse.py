"""From a completion's text to the message that the harness is given.

Invariants
- What cannot be parsed is left in the text: the harness sees the model's mistake as it is, and the tokens are trained as sampled either way.
- Every tool call has a fresh id, unique in its rollout, and arguments that are a JSON object, as a string.
- Where no tools were offered nothing is a tool call.

Reasoning is `<think>…</think>` in front. Tool calls have one of the formats of `Format`; which one a model writes is known from its chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from gyre.trajectory.match import is_deep, strict

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _UNTHINK = "<think>", "</think>"
_PYTHON: Final = "<|python_tag|>"
_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_VALUE_END: Final = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>))")
_FUNCTION_END: Final = re.compile(r"\s*</function>\s*</tool_call>")
_PYTHONIC: Final = {"True": True, "False": False, "None": None}
_TYPES: Final[dict[str, Any]] = {"integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list, "null": type(None)}


class Format(StrEnum):
    """How a family of models writes a tool call."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    XML = "xml"
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`: Qwen3-Coder, Qwen3.5."""
    LLAMA = "llama"
    """`{"name": …, "parameters": {…}}` and nothing else: Llama 3.1 and later."""


class Reasoning(StrEnum):
    """Where reasoning is, in a completion."""

    NONE = "none"
    """Nowhere: what looks like it is text, for a template that knows none."""
    TAGGED = "tagged"
    """In front, between tags."""
    OPENED = "opened"
    """In front; the prompt ended with the opening tag."""


Offered = Mapping[str, Any]
"""The tools that a model was shown: name → JSON schema of the parameters."""


def parse(
    text: str, id_prefix: str, *, offered: Offered | None = None, form: Format = Format.HERMES, reasoning: Reasoning = Reasoning.TAGGED
) -> dict[str, Any]:
    """An assistant message in OpenAI's form. `text` is the completion without its end-of-turn token.

    Reasoning that was cut off before `</think>` is all reasoning.
    """
    thought, text = _split_reasoning(text, reasoning)
    calls: list[dict[str, str]] = []
    content = text
    if offered is not None:
        content, calls = _llama(text, offered) if form is Format.LLAMA else _tagged(text, form, offered)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [{"id": f"{id_prefix}_{i}", "type": "function", "function": call} for i, call in enumerate(calls)]
    return message


def _split_reasoning(text: str, how: Reasoning) -> tuple[str, str]:
    if how is Reasoning.NONE:
        return "", text
    if how is Reasoning.TAGGED:
        head = text.lstrip()
        if not head.startswith(_THINK):
            return "", text
        text = head[len(_THINK) :]
    thought, closed, rest = text.partition(_UNTHINK)
    return thought.strip(), rest.lstrip("\n") if closed else ""


def _tagged(text: str, form: Format, offered: Offered) -> tuple[str, list[dict[str, str]]]:
    """What is left of the text, and the calls between tags in it."""
    calls: list[dict[str, str]] = []
    kept: list[str] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        inside = start + len(_OPEN)
        call, end = _hermes_call(text, inside) if form is Format.HERMES else _xml_call(text, inside, offered)
        if call is None:
            kept.append(text[at:inside])
            at = inside
            continue
        kept.append(text[at:start])
        calls.append(call)
        at = end
    kept.append(text[at:])
    content = "".join(kept)
    return content.strip() if calls else content, calls


def _call(name: Any, arguments: Any) -> dict[str, str] | None:
    """A call, if it is one that can be told."""
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict) or is_deep(arguments):
        return None
    try:
        spelling = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        spelling.encode()
    except ValueError:  # 1e999 is infinite, which JSON cannot say; half of a surrogate pair is no text that could be sent
        return None
    return {"name": name, "arguments": spelling}


def _object(text: str, at: int) -> tuple[dict[str, Any] | None, int]:
    """The JSON object at `at`, and where it ends."""
    try:
        value, end = strict.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return value if isinstance(value, dict) else None, end


def _hermes_call(text: str, at: int) -> tuple[dict[str, str] | None, int]:
    """The call whose JSON starts at or behind `at`, and where its closing tag ends; None if there is no well-formed call."""
    value, end = _object(text, _skip(text, at))
    close = _skip(text, end)
    if value is None or not text.startswith(_CLOSE, close):
        return None, at
    return _call(value.get("name"), value.get("arguments")), close + len(_CLOSE)


def _xml_call(text: str, at: int, offered: Offered) -> tuple[dict[str, str] | None, int]:
    """The same for a call written in tags. A value is a string unless the tool's schema says otherwise and it can be read so."""
    function = _FUNCTION.match(text, at)
    if function is None:
        return None, at
    name = function[1].strip()
    schema = offered.get(name)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments: dict[str, Any] = {}
    here = function.end()
    while (parameter := _PARAMETER.match(text, here)) is not None:
        end = _VALUE_END.search(text, parameter.end())
        key = parameter[1].strip()
        if end is None or key in arguments:
            return None, at
        arguments[key] = _typed(text[parameter.end() : end.start()], properties.get(key) if isinstance(properties, dict) else None)
        here = end.end()
    close = _FUNCTION_END.match(text, here)
    return (_call(name, arguments), close.end()) if close else (None, at)


def _typed(value: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return value
    word = value.strip()
    if word in _PYTHONIC:
        read: Any = _PYTHONIC[word]
    else:
        try:
            read = strict.decode(word)
        except (ValueError, RecursionError):
            return value
    fits = any(isinstance(read, _TYPES.get(k, ())) and not (isinstance(read, bool) and k in ("integer", "number")) for k in kinds)
    return read if fits else value


def _kinds(schema: Any) -> list[str]:
    """The types that a schema allows, be it as one of several schemas."""
    if not isinstance(schema, dict):
        return []
    wanted = schema.get("type")
    kinds = [k for k in (wanted if isinstance(wanted, list) else [wanted]) if isinstance(k, str)]
    for among in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(among, list) and not is_deep(among):
            kinds += [k for inner in among for k in _kinds(inner)]
    return kinds


def _llama(text: str, offered: Offered) -> tuple[str, list[dict[str, str]]]:
    """The whole text, or what follows reasoning in it, is one call to a tool that was offered, or it is text."""
    at = _skip(text, 0)
    thought = ""
    if text.startswith(_THINK, at) and (end := text.find(_UNTHINK, at)) >= 0:
        thought = text[: end + len(_UNTHINK)]
        at = _skip(text, len(thought))
    value, end = _object(text, _skip(text, at + len(_PYTHON)) if text.startswith(_PYTHON, at) else at)
    name = value.get("name") if value is not None and not text[end:].strip() else None
    if value is None or not isinstance(name, str) or name not in offered:
        return text, []
    call = _call(name, value.get("parameters", value.get("arguments")))
    return (thought, [call]) if call else (text, [])


def _skip(text: str, at: int) -> int:
    """The next place at or behind `at` that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
