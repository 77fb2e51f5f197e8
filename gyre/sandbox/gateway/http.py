"""HTTP/1.1 on a Unix socket: one socket, one rollout.

Invariants
- The protocol is h11's; here are only the bytes in and out. Connections are kept alive; requests on one are answered one after the other.
- A client that closes its connection while its request is being handled cancels the handler. That is how a dropped stream is noticed.
- Heads, bodies, all unanswered bodies of a server together, and connections are bounded; a request over a bound is answered 413 (by the
  application, in its own form) or 431, a connection over the bound is closed. Nothing is kept for a client that is gone, and no client holds the
  event loop for long.
- After a 413 what the client still sends is read for a moment and thrown away: it could not read the answer while it writes.

What is answered is the application's business.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import h11

log = logging.getLogger(__name__)

_READ: Final = 1 << 18
_HEAD_BYTES: Final = 1 << 16
_HEAD_LINES: Final = 256
_HEAD_END: Final = re.compile(rb"\n\r?\n")
CONNECTIONS: Final = 256
_CLOSE_S: Final = 2.0
_LINGER_S: Final = 5.0
_BODIES: Final = 2  # bodies of a server's open requests, as a multiple of the limit for one
_TURN: Final = 64  # pieces of a body that are taken at a time: they may be of one byte each


class Request(NamedTuple):
    """One request with its whole body."""

    method: str
    path: str  # without query
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class Response(NamedTuple):
    """`body` is the whole body, or pieces of it that are sent as they come."""

    status: int
    content_type: str
    body: bytes | AsyncGenerator[bytes, None]


class App(Protocol):
    """What requests are handed to."""

    async def __call__(self, request: Request) -> Response: ...

    def refuse(self, request: Request, message: str) -> Response:
        """The answer to a request whose body is over a bound; the body is left out."""
        ...


class _Dropped(Exception):
    """The client closed its connection."""


class _TooLarge(Exception):
    """A body is over a bound."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request, self.message = request, message


class HttpServer:
    """Serves one application on one Unix socket."""

    def __init__(self, app: App, body_limit: int) -> None:
        self._app = app
        self._body_limit = body_limit
        self._room = _Room(_BODIES * body_limit)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self.failure: BaseException | None = None  # a bug in the application: the owner must not overlook it

    async def start(self, path: Path) -> None:
        """Listen on `path`; every user may connect, since the sandbox decides who sees the socket."""
        self._server = await asyncio.start_unix_server(self._connected, path, limit=_READ)
        self._path = path
        _open_to_all(path)

    async def close(self) -> None:
        """Stop listening, drop the connections, remove the socket."""
        if self._server is None or self._path is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        _remove(self._path)
        self._server = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(_Connection(self._app, self._body_limit, self._room, reader, writer).run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            log.error("the gateway failed", exc_info=error)


class _Room:
    """Bytes that the bodies of all open requests may still take."""

    def __init__(self, left: int) -> None:
        self.left = left


class _Connection:
    def __init__(self, app: App, body_limit: int, room: _Room, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._app, self._body_limit, self._room = app, body_limit, room
        self._taken = 0  # of the room
        self._reader, self._writer = reader, writer
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._is_head = False  # the request's answer has no body
        self._reading: asyncio.Task[bytes] | None = None  # a read that was begun while a handler ran

    async def run(self) -> None:
        try:
            while await self._one():
                self._free()
                self._h11.start_next_cycle()
        except (_Dropped, ConnectionError):
            self._writer.transport.abort()  # what a client that is gone has not read would be kept for ever
        finally:
            self._free()
            if self._reading is not None:
                self._reading.cancel()
            self._writer.close()

    def _free(self) -> None:
        self._room.left += self._taken
        self._taken = 0

    async def _one(self) -> bool:
        """Answer one request; False when the connection is to be closed."""
        self._is_head = False
        try:
            request = await self._request()
        except h11.RemoteProtocolError as e:
            if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await self._send(Response(e.error_status_hint, "text/plain", str(e).encode()))
            return False
        except _TooLarge as e:
            self._free()
            await self._send(self._app.refuse(e.request, e.message))
            await self._linger()
            return False
        if request is None:
            return False
        handler = asyncio.ensure_future(self._respond(request))
        try:
            while not handler.done():
                if self._reading is None:
                    self._reading = asyncio.ensure_future(self._reader.read(_READ))
                await asyncio.wait((handler, self._reading), return_when=asyncio.FIRST_COMPLETED)
                if self._reading.done() and not handler.done():
                    if not self._reading.result():
                        raise _Dropped
                    await asyncio.wait((handler,))  # the next request waits until this one is answered
            handler.result()
        finally:
            if not handler.done():
                handler.cancel()
                await asyncio.wait((handler,))
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    async def _linger(self) -> None:
        """Read and forget, until the client has finished or for a moment."""
        left = 2 * self._body_limit
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while left > 0 and (data := await self._reader.read(_READ)):
                    left -= len(data)

    async def _respond(self, request: Request) -> None:
        await self._send(await self._app(request))

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            if self._h11.their_state is h11.IDLE:
                self._check_head()
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._h11.they_are_waiting_for_100_continue:
                self._writer.write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            if self._reading is not None:
                data = await self._reading
                self._reading = None
            else:
                data = await self._reader.read(_READ)
            self._h11.receive_data(data)

    def _check_head(self) -> None:
        """Before it is parsed: thousands of headers take long."""
        data, _ = self._h11.trailing_data
        end = _HEAD_END.search(data)
        if data.count(b"\n", 0, end.start() if end else len(data)) > _HEAD_LINES:
            raise h11.RemoteProtocolError(f"the head has more than {_HEAD_LINES} lines", error_status_hint=431)

    async def _request(self) -> Request | None:
        """The next request, or None when the client has closed. Raises `h11.RemoteProtocolError`, `_TooLarge`."""
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        self._is_head = head.method == b"HEAD"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        request = Request(head.method.decode("latin-1"), head.target.decode("latin-1").partition("?")[0], headers, b"")
        body = bytearray()
        pieces = 0
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            self._taken += len(event.data)
            self._room.left -= len(event.data)
            if len(body) > self._body_limit:
                raise _TooLarge(request, f"the body exceeds {self._body_limit} bytes")
            if self._room.left < 0:
                raise _TooLarge(request, "the bodies of all open requests together are too large")
            pieces += 1
            if pieces % _TURN == 0:
                await asyncio.sleep(0)
        if not isinstance(event, h11.EndOfMessage):
            return None
        return request._replace(body=bytes(body))

    async def _send(self, response: Response) -> None:
        headers = [("Content-Type", response.content_type)]
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        else:
            headers.append(("Cache-Control", "no-cache"))
        out = self._h11.send(h11.Response(status_code=response.status, headers=headers)) or b""
        if isinstance(response.body, bytes):
            if not self._is_head:
                out += self._h11.send(h11.Data(data=response.body)) or b""
            out += self._h11.send(h11.EndOfMessage()) or b""
            self._writer.write(out)
        else:
            self._writer.write(out)
            async with aclosing(response.body) as pieces:
                async for piece in pieces:
                    self._writer.write(self._h11.send(h11.Data(data=piece)) or b"")
                    await self._writer.drain()
            self._writer.write(self._h11.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
