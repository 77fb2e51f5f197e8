"""OpenAI's responses: requests read into chat form, replies and streams written as output items.

Invariants
- The items of one reply (reasoning, text, calls) that come back become one assistant message again, even where a harness puts each call's output
  right behind it.
- A reply's reasoning is shown as a `reasoning` item whose `encrypted_content` is a handle: an item that comes back without its text is looked up.
- `previous_response_id` continues a response of this rollout unless it was made with `"store": false`. What is kept for it is bounded in bytes; the
  oldest goes first, and asking for it is an error that says so.
- A stream that has to wait opens with `response.created` and repeats `response.in_progress`: some clients count events, not bytes.

Function and custom tools, alone or in namespaces, are served. Tools that the service itself would run are left out.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from gyre.sandbox.gateway.chat import openai_code, openai_error, openai_message
from gyre.sandbox.gateway.protocol import (
    STATUS,
    Answer,
    Ask,
    Fault,
    Parts,
    Recall,
    Refusal,
    Request,
    Turn,
    decode,
    encode,
    event,
    function_tool,
    make_ask,
    read_object,
    read_objects,
)
from gyre.trajectory.match import Message, UnsupportedContent

_SAMPLING: Final = ("temperature", "top_p", "max_output_tokens", "max_tool_calls", "reasoning", "text", "tool_choice", "truncation")
_OURS: Final = re.compile(r"(call_c\d+)_\d+")  # a tool call's id: the part before the last number is the reply's
_CUSTOM: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class _Request(Request, kw_only=True):
    input: str | list[msgspec.Raw] | None = None
    instructions: str | list[dict[str, Any]] | None = None
    store: bool | None = True
    background: bool | None = False
    conversation: Any = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Any = None
    reasoning: Any = None
    text: Any = None
    truncation: Any = None


_requests: Final = msgspec.json.Decoder(_Request)


class _Tool(NamedTuple):
    """How a tool is called: in chat form it bears its namespace in its name, and a custom tool's text is the argument `input`."""

    name: str
    namespace: str | None
    custom: bool


class _Kept(NamedTuple):
    messages: list[Message]
    n_bytes: int


class Responses:
    """The dialect, and the responses of one rollout that may be continued. `keep_bytes` bounds them."""

    def __init__(self, recall: Recall, keep_bytes: int) -> None:
        self._recall = recall
        self._keep_bytes = keep_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._n_kept_bytes = 0
        self._count = 0
        self._items, self._tools = Parts(), Parts()

    def read(self, body: bytes) -> Turn:
        request: _Request = decode(_requests, body, "responses")
        if request.background or request.conversation is not None:
            raise Refusal(Fault.UNSUPPORTED, "neither background nor conversation is served")
        given = request.input
        items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else self._items.read(given or (), read_object)
        earlier = self._earlier(request.previous_response_id)
        if not items and not earlier:
            raise Refusal(Fault.MALFORMED, "input is empty")
        more = [i["tools"] for i in items if i.get("type") == "additional_tools" and isinstance(i.get("tools"), list)]
        ((tools, callable_),) = self._tools.read([request.tools], lambda part: _tools(read_objects(part)))
        for those in more:
            others, names = _tools([t for t in those if isinstance(t, dict)])
            tools, callable_ = tools + others, callable_ | names
        messages = _Items(self._recall, earlier).read(items)
        ask = make_ask("responses", request, [*_instructions(request.instructions), *messages], tools, _SAMPLING, request.max_output_tokens)
        self._count += 1
        turn = _ResponsesTurn(ask, f"resp_{self._count}", request.previous_response_id, callable_)
        if request.store is not False:
            turn.keep = lambda answer: self._keep(turn.id, _Kept([*messages, answer.message], len(body)))
        return turn

    def count(self, n_tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": n_tokens})

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        return STATUS[refusal.fault], encode(openai_error(refusal))

    def _earlier(self, response_id: str | None) -> list[Message]:
        if response_id is None:
            return []
        kept = self._kept.get(response_id)
        if kept is None:
            text = f"Previous response with id '{response_id[:100]}' not found: it was not stored, or there was no more room for it."
            raise Refusal(Fault.UNKNOWN_RESPONSE, text)
        return kept.messages

    def _keep(self, response_id: str, kept: _Kept) -> None:
        self._kept[response_id] = kept
        self._n_kept_bytes += kept.n_bytes
        while self._n_kept_bytes > self._keep_bytes and len(self._kept) > 1:
            self._n_kept_bytes -= self._kept.popitem(last=False)[1].n_bytes


class _Items:
    """Input items to messages, behind those of earlier responses."""

    def __init__(self, recall: Recall, earlier: list[Message]) -> None:
        self._recall = recall
        self._messages: list[Message] = list(earlier)
        self._first = len(earlier)  # those before are shared with what is kept: they are not changed
        self._open: Message | None = None  # the assistant's message that items are added to

    def read(self, items: list[dict[str, Any]]) -> list[Message]:
        for item in items:
            self._add(item)
        return self._messages

    def _add(self, item: dict[str, Any]) -> None:
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                reply = self._reply(lambda m: m["content"] is None and "tool_calls" not in m)
                reply["content"] = item.get("content")
            case "message":
                self._say({"role": item.get("role"), "content": item.get("content")})
            case "reasoning":
                reply = self._reply(lambda m: m["content"] is None and len(m) == 2)
                reply["reasoning_content"] = self._reasoning(item)
            case "function_call":
                function = {"name": _flat(item.get("namespace"), item.get("name")), "arguments": item.get("arguments")}
                self._call(str(item.get("call_id")), function)
            case "custom_tool_call":
                function = {"name": _flat(item.get("namespace"), item.get("name")), "arguments": {"input": item.get("input")}}
                self._call(str(item.get("call_id")), function)
            case "function_call_output" | "custom_tool_call_output":
                self._say({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            case "additional_tools":
                pass
            case kind:
                raise UnsupportedContent(f"an input item of type {str(kind)[:100]!r}")

    def _say(self, message: Message) -> None:
        self._open = None
        self._messages.append(message)

    def _reply(self, fits: Any) -> Message:
        """The assistant's message that an item belongs to: the open one if it fits, else a new one."""
        if self._open is None or not fits(self._open):
            self._open = {"role": "assistant", "content": None}
            self._messages.append(self._open)
        return self._open

    def _call(self, call_id: str, function: Message) -> None:
        reply = self._sibling(call_id) if self._open is None else self._open
        if reply is None:
            reply = self._reply(bool)
        reply.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _sibling(self, call_id: str) -> Message | None:
        """The reply that made this call too, if there are only outputs of its other calls in between."""
        ours = _OURS.fullmatch(call_id)
        for message in reversed(self._messages[self._first :]) if ours else ():
            if message["role"] != "tool":
                calls = message.get("tool_calls") if message["role"] == "assistant" else None
                theirs = _OURS.fullmatch(calls[-1]["id"]) if calls else None
                return message if ours and theirs and theirs[1] == ours[1] else None
        return None

    def _reasoning(self, item: dict[str, Any]) -> str:
        for key in ("content", "summary"):
            parts = item.get(key)
            if isinstance(parts, list):
                text = "".join(str(p["text"]) for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
                if text:
                    return text
        return self._recall(str(item.get("encrypted_content")))


class _ResponsesTurn:
    def __init__(self, ask: Ask, response_id: str, previous: str | None, tools: Mapping[str, _Tool]) -> None:
        self.ask, self.id = ask, response_id
        self.keep: Any = None  # called with the answer, when it is there
        self._previous, self._tools = previous, tools
        self._created = int(time.time())
        self._sent = 0  # events

    def whole(self, answer: Answer) -> bytes:
        return encode(self._complete(answer, self._items(answer)))

    def waiting(self) -> bytes:
        out = b"" if self._sent else self._event("response.created", response=self._response("in_progress"))
        return out + self._event("response.in_progress", response=self._response("in_progress"))

    def broken(self, refusal: Refusal) -> bytes:
        error = {"code": openai_code(refusal), "message": openai_message(refusal)}
        return self._event("response.failed", response=self._response("failed", error=error))

    def stream(self, answer: Answer) -> bytes:
        out = [] if self._sent else [self.waiting()]
        items = self._items(answer)
        for i, item in enumerate(items):
            out += self._item_events(i, item)
        response = self._complete(answer, items)
        out.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(out)

    def _item_events(self, i: int, item: dict[str, Any]) -> list[bytes]:
        at = {"item_id": item["id"], "output_index": i}
        match item["type"]:
            case "reasoning" | "message":
                part = item["content"][0]
                kind = f"response.{part['type']}"
                at |= {"content_index": 0}
                extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
                empty: dict[str, Any] = {"content": []}
                inner: list[tuple[str, dict[str, Any]]] = [
                    ("response.content_part.added", {"part": {**part, "text": ""}}),
                    (f"{kind}.delta", {"delta": part["text"], **extra}),
                    (f"{kind}.done", {"text": part["text"], **extra}),
                    ("response.content_part.done", {"part": part}),
                ]
            case "custom_tool_call":
                empty = {"input": ""}
                kind = "response.custom_tool_call_input"
                inner = [(f"{kind}.delta", {"delta": item["input"]}), (f"{kind}.done", {"input": item["input"]})]
            case _:
                empty = {"arguments": ""}
                kind = "response.function_call_arguments"
                arguments = item["arguments"]
                inner = [(f"{kind}.delta", {"delta": arguments}), (f"{kind}.done", {"name": item["name"], "arguments": arguments})]
        return [
            self._event("response.output_item.added", output_index=i, item={**item, **empty, "status": "in_progress"}),
            *(self._event(kind, **at, **fields) for kind, fields in inner),
            self._event("response.output_item.done", output_index=i, item=item),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        message, n = answer.message, answer.call_id
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append(
                {"id": f"rs_{n}", "type": "reasoning", "summary": [], "content": [part], "encrypted_content": n, "status": status},
            )
        if message.get("content") or not (items or message.get("tool_calls")):
            text: dict[str, Any] = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
            items.append({"id": f"msg_{n}", "type": "message", "role": "assistant", "status": status, "content": [text]})
        for call in message.get("tool_calls", ()):
            items.append(self._call(call, status))
        return items

    def _call(self, call: Message, status: str) -> dict[str, Any]:
        function = call["function"]
        tool = self._tools.get(function["name"], _Tool(function["name"], None, False))
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "name": tool.name, "status": status}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.custom:
            arguments = msgspec.json.decode(function["arguments"])
            if isinstance(arguments.get("input"), str) and len(arguments) == 1:  # else it cannot be said so, and stays a function's
                return {**item, "type": "custom_tool_call", "input": arguments["input"]}
        return {**item, "arguments": function["arguments"]}

    def _complete(self, answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
        if self.keep is not None:
            self.keep(answer)
        cut = answer.finish_reason == "length"
        usage = {
            "input_tokens": answer.n_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.n_completion,
            "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
            "total_tokens": answer.n_prompt + answer.n_completion,
        }
        response = self._response("incomplete" if cut else "completed", output=items, usage=usage)
        return {**response, "incomplete_details": {"reason": "max_output_tokens"} if cut else None}

    def _response(self, status: str, output: list[dict[str, Any]] | None = None, usage: Any = None, error: Any = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": self.ask.max_tokens,
            "metadata": {},
            "model": self.ask.model,
            "output": output or [],
            "parallel_tool_calls": True,
            "previous_response_id": self._previous,
            "store": self.keep is not None,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": usage,
        }


def _flat(namespace: Any, name: Any) -> Any:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _instructions(instructions: str | list[dict[str, Any]] | None) -> list[Message]:
    if isinstance(instructions, list):
        return _Items(lambda handle: "", []).read(instructions)
    return [{"role": "system", "content": instructions}] if instructions else []


def _tools(given: list[dict[str, Any]], namespace: str | None = None) -> tuple[list[Message], dict[str, _Tool]]:
    """Tools in chat form, and how each is called."""
    tools: list[Message] = []
    known: dict[str, _Tool] = {}
    for tool in given:
        kind, name = tool.get("type"), tool.get("name")
        if not isinstance(name, str):
            continue
        if kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
            inner, names = _tools([t for t in tool["tools"] if isinstance(t, dict)], name)
            tools += inner
            known |= names
        elif kind in ("function", "custom"):
            custom = kind == "custom"
            flat = _flat(namespace, name)
            description = _with_grammar(tool) if custom else tool.get("description")
            tools.append(function_tool(flat, description, _CUSTOM if custom else tool.get("parameters")))
            known[flat] = _Tool(name, namespace, custom)
    return tools, known


def _with_grammar(tool: dict[str, Any]) -> str:
    """A custom tool's description; the grammar of its text, which nothing enforces here, is told to the model."""
    description, form = tool.get("description"), tool.get("format")
    text = description if isinstance(description, str) else ""
    if isinstance(form, dict) and form.get("type") == "grammar" and isinstance(form.get("definition"), str):
        text += f"\n\nThe input follows this grammar ({form.get('syntax')}):\n{form['definition']}"
    return text
