"""A TCP proxy between two processes of a run, that does to its connections what networks do. It runs in a thread of its own.

TCP hides what is lost on the way; what it cannot hide are bytes that come late, connections that stand still, that are dead at one end only, that are
reset, and ends that do not accept.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from enum import StrEnum


class Fault(StrEnum):
    NONE = "none"
    SLOW = "slow"  # each piece comes late
    STALLED = "stalled"  # nothing comes, in either direction, and then all of it
    HALF_OPEN = "half-open"  # what the client sends is lost, and it is not told; when it is over the connection is reset
    RESET = "reset"  # all connections, and every new one
    DEAF = "deaf"  # connections are reset, new ones are not accepted


SLOW_S, LOOK_S = 0.2, 0.02


class Link:
    """From `port`, where the proxy listens, to `target`."""

    def __init__(self, target: int) -> None:
        self.target, self.fault, self.lost = target, Fault.NONE, False
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setblocking(False)
        self.port: int = self.listening.getsockname()[1]
        self.writers: set[asyncio.StreamWriter] = set()
        self.passed = 0

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self.fault is Fault.DEAF:  # noqa: ASYNC110 - faults are set by another thread
                await asyncio.sleep(LOOK_S)
            accepted, _ = await loop.sock_accept(self.listening)
            task = asyncio.create_task(self._connection(accepted))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def watch(self) -> None:
        """Reset what the fault resets, at its beginning or its end."""
        while True:
            if self.fault in (Fault.RESET, Fault.DEAF) or (self.lost and self.fault is not Fault.HALF_OPEN):
                for writer in [w for w in self.writers if not w.transport.is_closing()]:
                    linger = struct.pack("ii", 1, 0)  # a reset, not an end
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                self.lost = False
            await asyncio.sleep(LOOK_S)

    async def _connection(self, accepted: socket.socket) -> None:
        here = await asyncio.open_connection(sock=accepted)
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            here[1].transport.abort()
            return
        writers = {here[1], there[1]}
        self.writers |= writers
        try:
            await asyncio.gather(self._pipe(here[0], there[1], True), self._pipe(there[0], here[1], False))
        except OSError:
            pass
        finally:
            self.writers -= writers
            for writer in writers:
                writer.transport.abort()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, from_client: bool) -> None:
        while data := await source.read(1 << 16):
            if self.fault is Fault.HALF_OPEN and from_client:
                self.lost = True
                continue
            if self.fault is Fault.SLOW:
                await asyncio.sleep(SLOW_S)
            while self.fault is Fault.STALLED:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            if self.lost and from_client:
                continue  # a stream with a hole is not to be read on
            sink.write(data)
            self.passed += len(data)
            await sink.drain()
        raise ConnectionResetError


class Proxy(threading.Thread):
    """All links of a test."""

    def __init__(self, **targets: int) -> None:
        super().__init__()
        self.links = {name: Link(target) for name, target in targets.items()}
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self.start()

    def run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        tasks = [asyncio.create_task(work) for link in self.links.values() for work in (link.serve(), link.watch())]
        await self._over.wait()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in [*tasks, *rest]:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for link in self.links.values():
            link.listening.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join(30)
