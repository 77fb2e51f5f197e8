"""Records of a run on another host, from its buffer: what `dump.records` yields there, page by page, in order.

The buffer may be killed and started again meanwhile: the page that is asked for says how many records are here already.

Not here: formats that need the run's own files (ATIF).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gyre.errors import Refused, UsageError
from gyre.net.keys import Keys
from gyre.net.sockets import Client, mint
from gyre.report.read import Record
from gyre.wire.codec import Arrays
from gyre.wire.messages import AskRecords, Counters, FromBuffer, Message, Refuse, Subscribe

_ANSWER_S: Final = 60.0  # for a page; one without a buffer at all is told of as soon
_POLL_S: Final = 0.5  # less than a finished buffer waits for whoever still asks


class Remote:
    """A buffer to read from. A context manager."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._said: Counters | None = None  # pushed last
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(address, keys))

    async def _connect(self, address: str, keys: Keys | None) -> Client:
        incarnation = os.urandom(6).hex()

        def on_push(message: Message, _: Arrays) -> None:
            if isinstance(message, Counters):
                self._said = message

        return Client.connect(address, FromBuffer, kind="observer", name="dump", incarnation=incarnation, on_push=on_push, keys=keys)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        self._client.close()

    def _request(self, message: Message) -> tuple[Any, Arrays]:
        reply, arrays = self._runner.run(self._client.request(message, deadline_s=_ANSWER_S, what="records of gyre-buffer"))
        if isinstance(reply, Refuse):
            raise Refused(reply.reason)
        return reply, arrays

    def records(self, asked: AskRecords) -> Iterator[Record]:
        have, done = 0, False
        while not done:
            reply, arrays = self._request(msgspec.structs.replace(asked, id=mint(), have=have))
            page: list[Record] = msgspec.msgpack.decode(arrays["data"])
            yield from page
            have, done = have + len(page), reply.done

    def follow(self, asked: AskRecords) -> Iterator[Record | None]:
        """As `dump.follow`: the records of each step once it is committed, None now and then, until the run is finished."""
        if asked.kind in ("events", "queries", "evals"):
            raise UsageError("--follow", f"{asked.kind} are followed in the run directory alone", "give that, or leave out --follow")
        step, end = (asked.first_step or 1) - 1, asked.last_step
        while True:
            counters, _ = self._request(Subscribe(id=mint()))
            assert isinstance(counters, Counters)
            last = counters.step if end is None else min(end, counters.step)
            if last > step:
                yield from self.records(msgspec.structs.replace(asked, first_step=step + 1, last_step=last))
                step = last
            if counters.finished or counters.failure:
                return
            yield None
            self._runner.run(asyncio.sleep(_POLL_S))
            if self._said is not None and self._said.finished and step >= (self._said.step if end is None else min(end, self._said.step)):
                return  # a coordinator may have ended the buffer by now
