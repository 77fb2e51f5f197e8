"""OpenAI's chat completions on top of a session: streaming and not, tools, errors in OpenAI's form.

Invariants
- Usage counts are the true ones: harnesses compact by them.
- The model's name and the sampling parameters of a request are ignored, since the run decides them; only the token budget may be lowered.
- Generation is never streamed from upstream: a stream is replayed when the call is complete, with comments meanwhile to keep it alive. Until the
  first comment a failure is an HTTP status; afterwards it is an event in the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final

import msgspec

from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.sandbox.gateway.http import Request, Response
from gyre.sandbox.gateway.route import ContextFull
from gyre.sandbox.gateway.session import Answer, Over, Session
from gyre.sandbox.gateway.template import TemplateRefused
from gyre.trajectory.match import UnsupportedContent

_JSON: Final = "application/json"
_SSE: Final = "text/event-stream"
_MODEL: Final = "policy"


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _ChatRequest(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: Annotated[str, msgspec.Meta(max_length=1024)] = _MODEL  # it is echoed in every chunk
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None

    @property
    def budget(self) -> int | None:
        """The harness's own limit of tokens, if it has one."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None and n > 0]
        return min(given) if given else None


class _Refusal(Exception):
    """A request that cannot be answered, with all that the error needs."""

    def __init__(self, status: int, kind: str, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


_requests: Final = msgspec.json.Decoder(_ChatRequest)
_encode: Final = msgspec.json.encode


class ChatApp:
    """Answers the HTTP requests of one rollout."""

    def __init__(self, session: Session, keep_alive_s: float = 5.0) -> None:
        self._session = session
        self._keep_alive_s = keep_alive_s

    async def __call__(self, request: Request) -> Response:
        try:
            match request.method, request.path.removeprefix("/v1"):
                case "POST", "/chat/completions":
                    return await self._chat(request.body)
                case "GET", "/models":
                    model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "gyre"}
                    return Response(200, _JSON, _encode({"object": "list", "data": [model]}))
                case _:
                    raise _Refusal(404, "invalid_request_error", "unknown_url", f"unknown request: {request.method} {request.path}")
        except _Refusal as e:
            return Response(e.status, _JSON, _encode(e.body))

    async def _chat(self, body: bytes) -> Response:
        try:
            chat = _requests.decode(body)
        except (msgspec.DecodeError, RecursionError) as e:
            raise _Refusal(400, "invalid_request_error", None, f"not a chat completion request: {e}") from None
        if not chat.messages:
            raise _Refusal(400, "invalid_request_error", None, "messages is empty")
        if chat.n not in (None, 1):
            raise _Refusal(400, "invalid_request_error", "unsupported_value", "only n = 1 is served")
        if not chat.stream:
            return Response(200, _JSON, _encode(_whole(chat, await self._complete(chat))))
        task = asyncio.ensure_future(self._complete(chat))
        try:
            done, _ = await asyncio.wait((task,), timeout=self._keep_alive_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return Response(200, _SSE, _replay(chat, task.result()))
        return Response(200, _SSE, self._stream(chat, task))

    async def _stream(self, chat: _ChatRequest, task: asyncio.Task[Answer]) -> AsyncGenerator[bytes, None]:
        try:
            while not task.done():
                yield b": keep-alive\n\n"
                await asyncio.wait((task,), timeout=self._keep_alive_s)
            try:
                yield _replay(chat, task.result())
            except _Refusal as e:
                yield _event(e.body)
        finally:
            task.cancel()

    async def _complete(self, chat: _ChatRequest) -> Answer:
        tools = None if chat.tool_choice == "none" else chat.tools
        try:
            return await self._session.complete(chat.messages, tools, chat.budget)
        except ContextFull as e:
            text = f"This model's maximum context length is {e.limit} tokens, but the messages have {e.n_prompt} tokens."
            raise _Refusal(400, "invalid_request_error", "context_length_exceeded", text) from None
        except (UnsupportedContent, TemplateRefused) as e:
            raise _Refusal(400, "invalid_request_error", None, str(e)) from None
        except RecursionError:
            raise _Refusal(400, "invalid_request_error", None, "messages or tools are nested too deeply") from None
        except Over as e:
            raise _Refusal(410, "rollout_over", "rollout_over", str(e)) from None
        except (DeadlineExceeded, WorkFailed) as e:
            raise _Refusal(503, "server_error", "unavailable", str(e)) from None


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.n_prompt,
        "completion_tokens": answer.n_completion,
        "total_tokens": answer.n_prompt + answer.n_completion,
    }


def _head(chat: _ChatRequest, answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.call_id}", "object": kind, "created": int(time.time()), "model": chat.model}


def _whole(chat: _ChatRequest, answer: Answer) -> dict[str, Any]:
    choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
    return {**_head(chat, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


def _replay(chat: _ChatRequest, answer: Answer) -> bytes:
    """The whole stream of a complete call."""
    head = _head(chat, answer, "chat.completion.chunk")
    with_usage = chat.stream_options is not None and chat.stream_options.include_usage
    message = answer.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content"):
        if message.get(key):
            deltas.append({key: message[key]})
    for i, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": i, **call}]})
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    events = [
        _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **extra})
        for delta, reason in [*((d, None) for d in deltas), ({}, answer.finish_reason)]
    ]
    if with_usage:
        events.append(_event({**head, "choices": [], "usage": _usage(answer)}))
    return b"".join(events) + b"data: [DONE]\n\n"
