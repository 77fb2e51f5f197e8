"""One rollout's model endpoint: which request is whose, and how it is waited for.

Invariants
- A request has an answer or an error of its own protocol, whatever was sent.
- Generation is never streamed from upstream: a stream is written when the call is complete, and kept alive meanwhile. Until the first sign of life
  a failure is an HTTP status; afterwards it is an event in the stream.
- A body is bounded by what could fit the context, in bytes and in JSON values, before it is decoded; a large one is read aside (`Session.alone`).
- Every model's name is the policy, unless the run names those that it serves.

The protocols themselves are adapters (`chat`, `responses`, `anthropic`); calls are the session's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any, Final

from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.sandbox.gateway.anthropic import Anthropic
from gyre.sandbox.gateway.chat import Chat
from gyre.sandbox.gateway.http import Request, Response
from gyre.sandbox.gateway.protocol import POLICY, Answer, Dialect, Fault, Refusal, Turn, encode
from gyre.sandbox.gateway.responses import Responses
from gyre.sandbox.gateway.route import ContextFull
from gyre.sandbox.gateway.session import Over, Session
from gyre.sandbox.gateway.template import TemplateRefused
from gyre.trajectory.match import UnsupportedContent

_JSON: Final = "application/json"
_SSE: Final = "text/event-stream"
_TOKEN_BYTES: Final = 32  # of a body for each token of the context: several times what text in JSON takes
_MORE_BYTES: Final = 1 << 20
_TOKEN_VALUES: Final = 8
_MORE_VALUES: Final = 100_000


def body_limit(context: int) -> int:
    """Bytes that a request's body may have, for a context of so many tokens."""
    return _TOKEN_BYTES * context + _MORE_BYTES


class Endpoint:
    """Answers the HTTP requests of one rollout. `models` are the names that it serves, all if empty."""

    def __init__(self, session: Session, keep_alive_s: float = 5.0, models: Collection[str] = ()) -> None:
        self._session = session
        self._keep_alive_s = keep_alive_s
        self._models = models
        chat, responses = Chat(), Responses(session.recall, 2 * body_limit(session.limits.context))
        anthropic = Anthropic(session.recall)
        self._openai, self._anthropic = chat, anthropic
        self._routes: dict[tuple[str, str], tuple[Dialect, Callable[[Dialect, bytes], Awaitable[Response]]]] = {
            ("POST", "/chat/completions"): (chat, self._call),
            ("POST", "/responses"): (responses, self._call),
            ("POST", "/responses/input_tokens"): (responses, self._count),
            ("POST", "/messages"): (anthropic, self._call),
            ("POST", "/messages/count_tokens"): (anthropic, self._count),
        }

    async def __call__(self, request: Request) -> Response:
        path = request.path.removeprefix("/v1")
        dialect, handle = self._routes.get((request.method, path), (self._dialect(request), None))
        try:
            if handle is not None:
                return await handle(dialect, request.body)
            if request.method == "GET" and (path == "/models" or path.startswith("/models/")):
                return self._list(path.removeprefix("/models").removeprefix("/"))
            raise Refusal(Fault.UNKNOWN_URL, f"unknown request: {request.method} {request.path[:200]}")
        except Refusal as e:
            return _error(dialect, e)

    def refuse(self, request: Request, message: str) -> Response:
        """The answer to a request that is too large."""
        self._session.context_full = True
        return _error(self._dialect(request), Refusal(Fault.TOO_LARGE, message))

    def _dialect(self, request: Request) -> Dialect:
        anthropic = request.path.removeprefix("/v1").startswith("/messages") or "anthropic-version" in request.headers
        return self._anthropic if anthropic else self._openai

    def _list(self, name: str) -> Response:
        """Models, in a form that has what OpenAI's and Anthropic's clients look for."""
        names = list(self._models) or [POLICY]
        if name and name not in names:
            raise Refusal(Fault.UNKNOWN_MODEL, f"model: {name[:200]}")
        context, reply = self._session.limits.context, self._session.limits.sampling.max_tokens
        shared = {"object": "model", "created": 0, "owned_by": "gyre", "type": "model", "created_at": "1970-01-01T00:00:00Z"}
        sizes = {"max_input_tokens": context, "max_tokens": reply}
        models = [{"id": n, "display_name": n, **shared, **sizes} for n in ([name] if name else names)]
        if name:
            return Response(200, _JSON, encode(models[0]))
        return Response(200, _JSON, encode({"object": "list", "data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}))

    def _read(self, dialect: Dialect, body: bytes) -> Turn:
        most = _TOKEN_VALUES * self._session.limits.context + _MORE_VALUES
        if len(body) > most and body.count(b",") + body.count(b"{") + body.count(b"[") > most:
            self._session.context_full = True
            raise Refusal(Fault.TOO_LARGE, "the request has more JSON values than could fit the context")
        try:
            turn = dialect.read(body)
        except UnsupportedContent as e:
            raise Refusal(Fault.MALFORMED, str(e)) from None
        if self._models and turn.ask.model not in self._models:
            raise Refusal(Fault.UNKNOWN_MODEL, f"model: {turn.ask.model[:200]}")
        return turn

    async def _count(self, dialect: Dialect, body: bytes) -> Response:
        turn = await self._session.alone(len(body), self._read, dialect, body)
        return Response(200, _JSON, dialect.count(await self._guarded(turn, self._session.count, len(body))))

    async def _call(self, dialect: Dialect, body: bytes) -> Response:
        turn = await self._session.alone(len(body), self._read, dialect, body)
        if not turn.ask.stream:
            return Response(200, _JSON, turn.whole(await self._guarded(turn, self._session.complete, len(body))))
        task: asyncio.Task[Answer] = asyncio.ensure_future(self._guarded(turn, self._session.complete, len(body)))
        try:
            done, _ = await asyncio.wait((task,), timeout=self._keep_alive_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return Response(200, _SSE, turn.stream(task.result()))
        return Response(200, _SSE, self._stream(turn, task))

    async def _stream(self, turn: Turn, task: asyncio.Task[Answer]) -> AsyncGenerator[bytes, None]:
        try:
            while not task.done():
                yield turn.waiting()
                await asyncio.wait((task,), timeout=self._keep_alive_s)
            try:
                yield turn.stream(task.result())
            except Refusal as e:
                yield turn.broken(e)
        finally:
            task.cancel()

    @staticmethod
    async def _guarded(turn: Turn, work: Callable[[Any, int], Any], n_bytes: int) -> Any:
        """What the session says, its failures as refusals."""
        try:
            return await work(turn.ask, n_bytes)
        except ContextFull as e:
            raise Refusal(Fault.CONTEXT_FULL, str(e), e.n_prompt, e.limit) from None
        except (UnsupportedContent, TemplateRefused) as e:
            raise Refusal(Fault.MALFORMED, str(e)) from None
        except RecursionError:
            raise Refusal(Fault.MALFORMED, "messages or tools are nested too deeply") from None
        except Over as e:
            raise Refusal(Fault.OVER, str(e)) from None
        except (DeadlineExceeded, WorkFailed) as e:
            raise Refusal(Fault.UNAVAILABLE, str(e)) from None


def _error(dialect: Dialect, refusal: Refusal) -> Response:
    status, body = dialect.error(refusal)
    return Response(status, _JSON, body)
