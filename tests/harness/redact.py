"""Keep of a recorded request what is ours and what the protocols name; all other text becomes a mark, the same for the same text.

So what a harness did to its history can be seen and replayed (what came back, what changed, what was left out), and not one of its words is kept.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

from scenarios import OURS

_NAMED = frozenset(("role", "type", "id", "call_id", "tool_call_id", "tool_use_id", "name", "namespace", "model", "status", "stop_reason",
                    "signature", "encrypted_content", "cache_control",
                    "previous_response_id", "required"))  # fmt: skip
"""Keys whose values are names and identifiers."""
_DROPPED = frozenset(("description", "metadata", "client_metadata", "prompt_cache_key", "$schema", "format", "pattern", "examples"))
_MARK = re.compile(r"‹[0-9a-f]{12}›")
_KEEP = re.compile("|".join([_MARK.pattern, *(re.escape(text) for text in sorted(OURS, key=len, reverse=True))]))


def _mark(text: str) -> str:
    if not re.search(r"[^\W\d_]", text):  # no letters: numbers and punctuation
        return text
    return f"‹{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}›"


def text(value: str) -> str:
    out, at = [], 0
    for kept in _KEEP.finditer(value):
        out += [_mark(value[at : kept.start()]), kept[0]]
        at = kept.end()
    return "".join([*out, _mark(value[at:])])


def redact(value: Any, *, ours: bool = False) -> Any:
    """A JSON value without foreign text. `ours`: this string is a name or an identifier. Doing it twice changes nothing."""
    if isinstance(value, str):
        return value if ours else text(value)
    if isinstance(value, list):
        return [redact(item, ours=ours) for item in value]
    if isinstance(value, dict):
        return {key: redact(item, ours=key in _NAMED) for key, item in value.items() if key not in _DROPPED or not isinstance(item, (str, dict))}
    return value
