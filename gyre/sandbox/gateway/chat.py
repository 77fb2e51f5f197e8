"""OpenAI's chat completions: requests read, replies and streams written.

Invariants
- Messages are taken as they are, `match.normalise` knows the form. So a reply that comes back is the message that was recorded.
- Usage counts are the true ones: harnesses compact by them.
- A stream is written whole when the call is complete, with comments meanwhile to keep it alive.

Model names and when to refuse are the endpoint's business.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from gyre.sandbox.gateway.protocol import (
    STATUS,
    Answer,
    Ask,
    Fault,
    Parts,
    Refusal,
    Request,
    Turn,
    decode,
    encode,
    event,
    make_ask,
    read_object,
    read_objects,
)

_CODES: Final = {  # kind, code
    Fault.MALFORMED: ("invalid_request_error", None),
    Fault.UNSUPPORTED: ("invalid_request_error", "unsupported_value"),
    Fault.CONTEXT_FULL: ("invalid_request_error", "context_length_exceeded"),
    Fault.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Fault.UNKNOWN_URL: ("invalid_request_error", "unknown_url"),
    Fault.UNKNOWN_MODEL: ("invalid_request_error", "model_not_found"),
    Fault.UNKNOWN_RESPONSE: ("invalid_request_error", "previous_response_not_found"),
    Fault.OVER: ("rollout_over", "rollout_over"),
    Fault.UNAVAILABLE: ("server_error", "unavailable"),
}
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "stop", "logit_bias",
    "max_tokens", "max_completion_tokens", "reasoning_effort", "response_format", "tool_choice",
)  # fmt: skip


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Request(Request, kw_only=True):
    messages: list[msgspec.Raw]
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    top_k: Any = None
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    stop: Any = None
    logit_bias: Any = None
    reasoning_effort: Any = None
    response_format: Any = None


_requests: Final = msgspec.json.Decoder(_Request)


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """The object that OpenAI's APIs answer errors with."""
    kind, code = _CODES[refusal.fault]
    return {"error": {"message": openai_message(refusal), "type": kind, "param": None, "code": code}}


def openai_message(refusal: Refusal) -> str:
    """The error's text; a prompt that is too long is told in OpenAI's words, which harnesses look for."""
    if refusal.fault is Fault.CONTEXT_FULL:
        return f"This model's maximum context length is {refusal.limit} tokens, but the messages have {refusal.n_prompt} tokens."
    return refusal.message


def openai_code(refusal: Refusal) -> str:
    """The error's code, or its kind where it has none."""
    kind, code = _CODES[refusal.fault]
    return code or kind


class Chat:
    """The dialect."""

    def __init__(self) -> None:
        self._messages, self._tools = Parts(), Parts()

    def read(self, body: bytes) -> Turn:
        request: _Request = decode(_requests, body, "chat completion")
        if not request.messages:
            raise Refusal(Fault.MALFORMED, "messages is empty")
        if request.n not in (None, 1):
            raise Refusal(Fault.UNSUPPORTED, "only n = 1 is served")
        messages = self._messages.read(request.messages, read_object)
        (tools,) = self._tools.read([request.tools], read_objects)
        ask = make_ask("chat", request, messages, tools, _SAMPLING, request.max_tokens, request.max_completion_tokens)
        return _ChatTurn(ask, request.stream_options is not None and bool(request.stream_options.include_usage))

    def count(self, n_tokens: int) -> bytes:
        raise Refusal(Fault.UNKNOWN_URL, "chat completions have no such request")

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        return STATUS[refusal.fault], encode(openai_error(refusal))


class _ChatTurn:
    def __init__(self, ask: Ask, with_usage: bool) -> None:
        self.ask = ask
        self._with_usage = with_usage

    def whole(self, answer: Answer) -> bytes:
        choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
        return encode({**self._head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)})

    def waiting(self) -> bytes:
        return b": keep-alive\n\n"

    def broken(self, refusal: Refusal) -> bytes:
        return event(openai_error(refusal))

    def stream(self, answer: Answer) -> bytes:
        head = self._head(answer, "chat.completion.chunk")
        message = answer.message
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for key in ("reasoning_content", "content"):
            if message.get(key):
                deltas.append({key: message[key]})
        for i, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": i, **call}]})
        extra: dict[str, Any] = {"usage": None} if self._with_usage else {}
        events = [
            event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **extra})
            for delta, reason in [*((d, None) for d in deltas), ({}, answer.finish_reason)]
        ]
        if self._with_usage:
            events.append(event({**head, "choices": [], "usage": _usage(answer)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.call_id}", "object": kind, "created": int(time.time()), "model": self.ask.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.n_prompt,
        "completion_tokens": answer.n_completion,
        "total_tokens": answer.n_prompt + answer.n_completion,
        "completion_tokens_details": {"reasoning_tokens": answer.n_reasoning},
    }
