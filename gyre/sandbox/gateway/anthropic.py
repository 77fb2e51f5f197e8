"""Anthropic's messages: requests read into chat form, replies and streams written as content blocks.

Invariants
- Tool results of a user's turn become messages of the tool, its texts messages of the user, in the order they came in.
- Reasoning is shown as `thinking` blocks where the request asks for thinking. Their signature is a handle: a block that comes back without its
  text is looked up. A harness that drops them is recognised all the same.
- Usage counts are the true ones: harnesses compact by them.

Tools that the service itself would run (web search, code execution) are left out: only those with an `input_schema` are the harness's.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import msgspec

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

_KINDS: Final = {
    Fault.MALFORMED: "invalid_request_error",
    Fault.UNSUPPORTED: "invalid_request_error",
    Fault.CONTEXT_FULL: "invalid_request_error",
    Fault.TOO_LARGE: "request_too_large",
    Fault.UNKNOWN_URL: "not_found_error",
    Fault.UNKNOWN_MODEL: "not_found_error",
    Fault.UNKNOWN_RESPONSE: "not_found_error",
    Fault.OVER: "permission_error",
    Fault.UNAVAILABLE: "overloaded_error",
}
_STOPS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SAMPLING: Final = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "thinking", "tool_choice", "output_config")
_OVERLOADED: Final = 529
_BILLING: Final = "x-anthropic-billing-header:"  # a header in a system block's clothes: it changes from call to call and is no part of the prompt


class _Request(Request, kw_only=True):
    messages: list[msgspec.Raw]
    system: str | list[Any] | None = None
    max_tokens: int | None = None
    thinking: Any = None
    top_k: Any = None
    stop_sequences: Any = None
    output_config: Any = None


_requests: Final = msgspec.json.Decoder(_Request)


class Anthropic:
    """The dialect. `recall` finds reasoning by the handle in a signature."""

    def __init__(self, recall: Recall) -> None:
        self._recall = recall
        self._turns, self._tools = Parts(), Parts()

    def read(self, body: bytes) -> Turn:
        request: _Request = decode(_requests, body, "messages")
        if not request.messages:
            raise Refusal(Fault.MALFORMED, "messages: at least one message is required")
        turns = self._turns.read(request.messages, self._messages)
        messages = [*_system(request.system), *chain.from_iterable(turns)]
        (tools,) = self._tools.read([request.tools], _tools)
        ask = make_ask("messages", request, messages, tools, _SAMPLING, request.max_tokens)
        return _AnthropicTurn(ask, isinstance(request.thinking, dict) and request.thinking.get("type") in ("enabled", "adaptive"))

    def count(self, n_tokens: int) -> bytes:
        return encode({"input_tokens": n_tokens})

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        status = _OVERLOADED if refusal.fault is Fault.UNAVAILABLE else STATUS[refusal.fault]
        return status, encode(_error(refusal))

    def _messages(self, part: bytes) -> list[Message]:
        """One turn's messages in chat form."""
        message = read_object(part)
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            return [self._assistant(content)]
        if role not in ("user", "system"):
            raise UnsupportedContent("a message whose role is none of user, assistant, system")
        if not isinstance(content, list):
            return [{"role": role, "content": content}]
        out: list[Message] = []
        for block in content:
            if isinstance(block, dict) and block.get("type") == "tool_result":
                out.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
            elif out and out[-1]["role"] == role:
                out[-1]["content"].append(block)
            else:
                out.append({"role": role, "content": [block]})
        return out or [{"role": role, "content": ""}]

    def _assistant(self, content: Any) -> Message:
        if not isinstance(content, list):
            return {"role": "assistant", "content": content}
        text: list[Any] = []
        reasoning: list[str] = []
        calls: list[Message] = []
        for block in content:
            match block.get("type") if isinstance(block, dict) else None:
                case "thinking" | "redacted_thinking":
                    shown = block.get("thinking")
                    reasoning.append(shown if isinstance(shown, str) and shown else self._recall(str(block.get("signature") or block.get("data"))))
                case "tool_use":
                    function = {"name": block.get("name"), "arguments": block.get("input")}
                    calls.append({"id": block.get("id"), "type": "function", "function": function})
                case _:
                    text.append(block)
        out: Message = {"role": "assistant", "content": text, "reasoning_content": "".join(reasoning)}
        if calls:
            out["tool_calls"] = calls
        return out


class _AnthropicTurn:
    def __init__(self, ask: Ask, thinks: bool) -> None:
        self.ask = ask
        self._thinks = thinks

    def whole(self, answer: Answer) -> bytes:
        return encode(self._message(answer, self._blocks(answer), _STOPS[answer.finish_reason], answer.n_completion))

    def waiting(self) -> bytes:
        return event({"type": "ping"}, "ping")

    def broken(self, refusal: Refusal) -> bytes:
        return event(_error(refusal), "error")

    def stream(self, answer: Answer) -> bytes:
        out = [_event("message_start", message=self._message(answer, [], None, 0))]
        for i, block in enumerate(self._blocks(answer)):
            empty, deltas = _deltas(block)
            out.append(_event("content_block_start", index=i, content_block=empty))
            out += [_event("content_block_delta", index=i, delta=delta) for delta in deltas]
            out.append(_event("content_block_stop", index=i))
        ended = {"stop_reason": _STOPS[answer.finish_reason], "stop_sequence": None}
        out.append(_event("message_delta", delta=ended, usage=_usage(answer, answer.n_completion)))
        out.append(_event("message_stop"))
        return b"".join(out)

    def _blocks(self, answer: Answer) -> list[dict[str, Any]]:
        message = answer.message
        blocks: list[dict[str, Any]] = []
        if self._thinks and message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": answer.call_id})
        if message.get("content"):
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            spelling = msgspec.Raw(function["arguments"].encode())  # as it is: numbers may be too large for an encoder
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": spelling})
        return blocks

    def _message(self, answer: Answer, blocks: list[dict[str, Any]], stop: str | None, n_out: int) -> dict[str, Any]:
        return {
            "id": f"msg_{answer.call_id}",
            "type": "message",
            "role": "assistant",
            "model": self.ask.model,
            "content": blocks,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": _usage(answer, n_out),
        }


def _tools(part: bytes) -> list[Message]:
    return [function_tool(t.get("name"), t.get("description"), t["input_schema"]) for t in read_objects(part) if "input_schema" in t]


def _system(system: str | list[Any] | None) -> list[Message]:
    parts = [system] if isinstance(system, str) else system or []
    kept = [p for p in parts if not (isinstance(p, dict) and str(p.get("text")).startswith(_BILLING))]
    return [{"role": "system", "content": kept}] if kept and kept != [""] else []


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream opens it, and what fills it."""
    match block["type"]:
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, {"type": "signature_delta", "signature": block["signature"]}]
            return {**block, "thinking": "", "signature": ""}, deltas
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _usage(answer: Answer, n_out: int) -> dict[str, Any]:
    return {"input_tokens": answer.n_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": n_out}


def _error(refusal: Refusal) -> dict[str, Any]:
    message = refusal.message
    if refusal.fault is Fault.CONTEXT_FULL:  # in Anthropic's words, which harnesses look for
        message = f"prompt is too long: {refusal.n_prompt} tokens > {refusal.limit} maximum"
    elif refusal.fault is Fault.UNAVAILABLE:
        message = f"Overloaded: {message}"
    return {"type": "error", "error": {"type": _KINDS[refusal.fault], "message": message}, "request_id": None}
