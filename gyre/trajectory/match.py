"""Recognise a harness's own history: which recorded call does this request continue?

Invariants
- A message's fingerprint covers role, text and [(call id, name, canonical arguments)]. Cosmetic differences (string or list content, `developer` or
  `system`, cache markers, the spelling of JSON arguments) do not change it; a renamed tool under the same call id does.
- A request continues a call if that call's messages and then its reply are a prefix of the request's messages, fingerprint by fingerprint, under the
  same tools. The longest such call wins, among equals the latest: the one that the harness has seen last.
- A reply's reasoning may be left out whenever it comes back (some protocols have no field for it, some harnesses drop it after a while). Reasoning
  that was *changed*, in any reply of the history, is another history.

Nothing here knows tokens: what is done with a match is the gateway's business.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final

import msgspec

Message = dict[str, Any]
_DEPTH: Final = 100  # of arguments that are looked into; far from where the interpreter's own limit is


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


strict: Final = json.JSONDecoder(parse_constant=_refuse)
_encoder: Final = msgspec.json.Encoder(order="deterministic")


class UnsupportedContent(ValueError):
    """A message holds what text models cannot be shown; the text names it."""


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnsupportedContent("content is neither a string nor a list of parts")
    parts: list[str] = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            parts.append(part["refusal"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnsupportedContent(f"content part of type {kind!r}")
    return "".join(parts)


def _tool_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnsupportedContent("a tool call without function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # malformed arguments that the harness echoes stay a string, as does half a surrogate pair
            parsed = strict.decode(arguments)
            if not is_deep(parsed):
                if "\\u" in arguments:
                    canonical(parsed)
                arguments = parsed
    elif is_deep(arguments):
        raise UnsupportedContent("tool arguments that are nested too deeply")
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def normalise(message: Any) -> Message:
    """The canonical form of a chat message: what is fingerprinted and what chat templates are given.

    Text is a string, tool arguments are parsed, `developer` is `system`, empty and cosmetic keys are gone. Raises `UnsupportedContent`.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnsupportedContent("a message without a role")
    role = "system" if message["role"] == "developer" else message["role"]
    out: Message = {"role": role, "content": _text(message.get("content"))}
    if role == "assistant":
        reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
        if reasoning:
            out["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise UnsupportedContent("tool_calls is not a list")
            out["tool_calls"] = [_tool_call(c) for c in message["tool_calls"]]
    elif role == "tool":
        out["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def is_deep(value: Any, levels: int = _DEPTH) -> bool:
    """Whether a JSON value is nested more than so many levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(is_deep(v, levels - 1) for v in inner if isinstance(v, (dict, list)))


def canonical(value: Any) -> bytes:
    """JSON text that is equal exactly when the parsed values are. Raises `ValueError` for half a surrogate pair."""
    return _encoder.encode(value)


def _plain(value: Any) -> Any:
    """A JSON value with its whole numbers as integers: JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def fingerprint(message: Message) -> bytes:
    """16 bytes for a message in canonical form, without its reasoning. White space around an assistant's text does not count: its ids are kept."""
    role, text = message["role"], message["content"]
    if role == "assistant":
        calls = [(c["id"], c["function"]["name"], _plain(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
        fields: list[Any] = [role, text.strip(), calls]
    else:
        fields = [role, text, message.get("tool_call_id", ""), message.get("name", "")]
    return blake2b(canonical(fields), digest_size=16).digest()


def thought(message: Message) -> bytes:
    """Stands for a message's reasoning; empty if it has none."""
    reasoning = message.get("reasoning_content", "").strip()
    return blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=16).digest() if reasoning else b""


def _link(before: bytes, item: bytes) -> bytes:
    return blake2b(before + item, digest_size=16).digest()


def chain(tools: bytes, messages: Sequence[Message], known: Sequence[bytes] = ()) -> list[bytes]:
    """Entry i stands for the tools and the first i messages; so there is one entry more than messages. `known` are the first entries, if they are."""
    links = list(known) or [_link(b"", tools)]
    for message in messages[len(links) - 1 :]:
        links.append(_link(links[-1], fingerprint(message)))
    return links


class Conversation(msgspec.Struct):
    """A request's history: as it came, in canonical form, as it is matched, as it is shown to the template, and of the form that is matched the chain
    under the tools `key` and what stands for each message's reasoning. `draft` is the renderer's."""

    given: Sequence[Message]
    normal: list[Message]
    messages: list[Message]
    guarded: list[Message]
    key: bytes
    links: list[bytes]
    thoughts: list[bytes]
    draft: Any


_NONE: Final = Conversation((), [], [], [], b"", [], [], None)


class Memory:
    """The conversations that came last. Most of the next request is one of them, and is not brought into form again."""

    def __init__(self, n: int = 3) -> None:
        self._recent: deque[Conversation] = deque(maxlen=n)

    def read(
        self, given: Sequence[Message], key: bytes, shape: Callable[[list[Message]], list[Message]], guard: Callable[[Message], Message]
    ) -> Conversation:
        """Bring a request into form; `shape` makes of canonical messages those that are matched, `guard` of each what the template is shown. Raises
        `UnsupportedContent`."""
        near, n = max(((c, _same(c.given, given)) for c in self._recent), key=lambda found: found[1], default=(_NONE, 0))
        normal = [*near.normal[:n], *(normalise(m) for m in given[n:])]
        messages = shape(normal)
        same = next((i for i, (a, b) in enumerate(zip(messages, near.messages, strict=False)) if a is not b), min(len(messages), len(near.messages)))
        if near is not _NONE and n == len(near.given):  # it goes on
            self._recent.remove(near)
        self._recent.append(
            Conversation(
                given,
                normal,
                messages,
                [*near.guarded[:same], *(guard(m) for m in messages[same:])],
                key,
                chain(key, messages, near.links[: 1 + same] if near.key == key else ()),
                [*near.thoughts[:same], *(thought(m) for m in messages[same:])],
                near.draft,
            )
        )
        return self._recent[-1]


def _same(a: Sequence[Message], b: Sequence[Message]) -> int:
    """How many messages two requests begin with alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x is y:
            continue
        if x != y or ("tool_calls" in x and _has_objects(x) and canonical(x) != canonical(y)):  # for Python 1 and True are equal
            return i
    return min(len(a), len(b))


def _has_objects(message: Message) -> bool:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):  # a client may send anything
        return True
    return not all(isinstance(c, dict) and isinstance(f := c.get("function"), dict) and isinstance(f.get("arguments"), str) for c in calls)


class Matcher:
    """The complete calls of one rollout, found by what they end with."""

    def __init__(self) -> None:
        self._by_end: dict[bytes, dict[bytes, str]] = {}  # by the reply's link, by its reasoning: the latest call, the latest of all behind

    def record(self, call_id: str, end: bytes, reply: Mapping[str, Any]) -> None:
        """A call is complete: `end` is the last entry of its request's chain, `reply` the message that the harness was given."""
        message = normalise(dict(reply))
        calls = self._by_end.setdefault(_link(end, fingerprint(message)), {})
        its = thought(message)
        calls.pop(its, None)
        calls[its] = call_id

    def find(self, links: Sequence[bytes], thoughts: Sequence[bytes]) -> str | None:
        """The longest recorded call that the request with this chain and these thoughts (of each message) continues."""
        for n in range(self._unchanged(links, thoughts), 0, -1):
            calls = self._by_end.get(links[n])
            if calls:
                its = thoughts[n - 1]
                return calls[its] if its else next(reversed(calls.values()))
        return None

    def _unchanged(self, links: Sequence[bytes], thoughts: Sequence[bytes]) -> int:
        """The number of messages before the first recorded reply that comes back with other reasoning."""
        for i, its in enumerate(thoughts):
            if its and (calls := self._by_end.get(links[i + 1])) and its not in calls:
                return i
        return len(thoughts)
