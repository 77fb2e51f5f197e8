"""Records for observers on other hosts (gyre-dump tcp://…): read as gyre-dump reads a run directory, a page at a time, beside the buffer's own work.

Invariants
- One thread reads, whoever asks; the loop only sends. What is read was committed, and nothing is held but a few open readings.
- A page is asked for by the number of records that its reader has, so a request that is repeated gets the same answer.

Not here: which records there are (gyre/report/dump.py).
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre.errors import GyreError
from gyre.net.sockets import Peer, Server, mint
from gyre.report import dump
from gyre.report.read import Record, RunReader, Selection
from gyre.wire.messages import AskRecords, Message, Records, Refuse

_PAGE_BYTES: Final = 4 << 20  # a record of a million tokens may be larger
_OPEN: Final = 8  # readings; one that was closed for another begins again, and skips what its reader has

Answer = tuple[Message, dict[str, Any] | None]


class _Reading:
    """One observer's way through the records."""

    def __init__(self, run_dir: Path, asked: AskRecords) -> None:
        self._reader = RunReader(run_dir, redact_system=asked.redact_system)
        chosen = Selection(asked.first_step, asked.last_step, asked.group_id, asked.rollout_id, asked.evaluation)
        found = dump.records(self._reader, asked.kind, chosen, tokens=asked.tokens)
        self._left: Iterator[Record] = itertools.islice(found, asked.have, None)
        self.have, self.wants = asked.have, _wants(asked)

    def page(self) -> tuple[bytes, bool]:
        """Records as a MessagePack array, and whether they were the last."""
        found: list[msgspec.Raw] = []
        size = 0
        while size < _PAGE_BYTES and (record := next(self._left, None)) is not None:
            found.append(msgspec.Raw(msgspec.msgpack.encode(record)))
            size += len(found[-1])
        self.have += len(found)
        return msgspec.msgpack.encode(found), size < _PAGE_BYTES

    def close(self) -> None:
        self._reader.close()


class Readers:
    """All observers that are being served."""

    def __init__(self, run_dir: Path, server: Server) -> None:
        self._dir, self._server = run_dir, server
        self._pool = ThreadPoolExecutor(1, "reader")
        self._open: dict[bytes, _Reading] = {}
        self._asked: set[str] = set()

    def take(self, peer: Peer, asked: AskRecords) -> None:
        """Answer in time. A repetition of what is being answered is let be."""
        if asked.id in self._asked:
            return
        self._asked.add(asked.id)

        def send(done: asyncio.Future[Answer]) -> None:
            self._asked.discard(asked.id)
            if not done.cancelled():
                self._server.send(peer, *done.result())

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._pool, self._answer, peer.identity, asked).add_done_callback(send)

    def _answer(self, identity: bytes, asked: AskRecords) -> Answer:
        try:
            data, done = self._page(identity, asked)
        except (GyreError, ModuleNotFoundError, OSError, sqlite3.Error, OverflowError, ValueError) as e:
            return Refuse(id=mint(), cause=asked.id, reason=str(e)), None
        return Records(id=mint(), cause=asked.id, done=done), {"data": memoryview(data)}

    def _page(self, identity: bytes, asked: AskRecords) -> tuple[bytes, bool]:
        reading = self._open.pop(identity, None)
        if reading is None or (reading.have, reading.wants) != (asked.have, _wants(asked)):
            if reading is not None:
                reading.close()
            reading = _Reading(self._dir, asked)
        data, done = reading.page()
        if done:
            reading.close()
        else:
            while len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[identity] = reading
        return data, done

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _wants(asked: AskRecords) -> AskRecords:
    return msgspec.structs.replace(asked, id="", cause="", have=0)
