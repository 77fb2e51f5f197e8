"""Keep of a recorded request what is ours and what the protocols name; all other text becomes a mark, the same for the same text.

So what a harness did to its history can be seen and replayed (what came back, what changed, what was left out), and not one of its words is kept.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

from scenarios import AGENT, ARGUMENTS, OURS

_NAMED = frozenset(
    [
        "role",
        "type",
        "id",
        "call_id",
        "tool_call_id",
        "tool_use_id",
        "name",
        "namespace",
        "model",
        "status",
        "stop_reason",
        "signature",
        "encrypted_content",
        "previous_response_id",
        "required",
        "include",
        "tool_choice",
        "effort",
        "reasoning_effort",
        "phase",
    ]
)
"""Keys whose values are names and identifiers."""
_DROPPED = frozenset(("metadata", "client_metadata", "prompt_cache_key", "user"))
_DROPPED_OF_TOOLS = frozenset(("description", "$schema", "format", "pattern", "examples", "definition"))
_MARK = re.compile(r"‹[0-9a-f]{12}›")
_WORDS = [*(f'"{word}"' for word in ARGUMENTS), *OURS, "x-anthropic-billing-header:"]
_KEEP = re.compile("|".join([_MARK.pattern, AGENT, *(re.escape(word) for word in sorted(_WORDS, key=len, reverse=True)), r"\b(?:true|false)\b"]))


def _mark(text: str) -> str:
    if not re.search(r"[^\W\d_]{2}", text):  # no two letters: numbers, punctuation, \n
        return text
    return f"‹{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}›"


def _text(value: str) -> str:
    if value in ARGUMENTS:
        return value
    out, at = [], 0
    for kept in _KEEP.finditer(value):
        out += [_mark(value[at : kept.start()]), kept[0]]
        at = kept.end()
    return "".join([*out, _mark(value[at:])])


def redact(value: Any, *, named: bool = False, tools: bool = False) -> Any:
    """A JSON value without foreign text. `named`: a string is a name or an identifier; `tools`: in the description of tools. Doing it twice changes
    nothing."""
    if isinstance(value, str):
        return value if named else _text(value)
    if isinstance(value, list):
        return [redact(item, named=named, tools=tools) for item in value]
    if isinstance(value, dict):
        gone = _DROPPED_OF_TOOLS if tools else _DROPPED
        kept = {key: item for key, item in value.items() if key not in gone or (tools and isinstance(item, dict) and key == "description")}
        return {key: redact(item, named=key in _NAMED, tools=tools or key == "tools") for key, item in kept.items()}
    return value
