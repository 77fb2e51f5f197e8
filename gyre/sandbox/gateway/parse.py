"""From a completion's text to the message that the harness is given.

Invariants
- What cannot be parsed is left in the text: the harness sees the model's mistake as it is, and the tokens are trained as sampled either way.
- Every tool call has a fresh id, unique in its rollout, and arguments that are a JSON object, as a string.

The format is Hermes' and Qwen's: `<think>…</think>`, then text with `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from gyre.trajectory.match import is_deep

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _UNTHINK = "<think>", "</think>"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_decoder: Final = json.JSONDecoder(parse_constant=_refuse)


def parse(text: str, id_prefix: str, opened_reasoning: bool = False) -> dict[str, Any]:
    """An assistant message in OpenAI's form. `text` is the completion without its end-of-turn token.

    `opened_reasoning` says that the prompt ended inside `<think>`. Reasoning that was cut off before `</think>` is all reasoning.
    """
    reasoning, text = _split_reasoning(text, opened_reasoning)
    calls: list[dict[str, Any]] = []
    kept: list[str] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        call, end = _tool_call(text, start + len(_OPEN))
        if call is None:
            kept.append(text[at : start + len(_OPEN)])
            at = start + len(_OPEN)
            continue
        kept.append(text[at:start])
        calls.append({"id": f"{id_prefix}_{len(calls)}", "type": "function", "function": call})
        at = end
    kept.append(text[at:])
    content = "".join(kept)
    if calls:
        content = content.strip()
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    if not opened:
        head = text.lstrip()
        if not head.startswith(_THINK):
            return "", text
        text = head[len(_THINK) :]
    reasoning, closed, rest = text.partition(_UNTHINK)
    return reasoning.strip(), rest.lstrip("\n") if closed else ""


def _tool_call(text: str, at: int) -> tuple[dict[str, str] | None, int]:
    """The call whose JSON starts at or behind `at`, and where its closing tag ends; None if there is no well-formed call."""
    start = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, at
    close = end + len(text[end:]) - len(text[end:].lstrip())
    if not text.startswith(_CLOSE, close) or not isinstance(value, dict):
        return None, at
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict) or is_deep(arguments):
        return None, at
    try:
        spelling = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        spelling.encode()
    except ValueError:  # 1e999 is infinite, which JSON cannot say; half of a surrogate pair is no text that could be sent
        return None, at
    return {"name": name, "arguments": spelling}, close + len(_CLOSE)
