"""Payload segments: append-only files `payload/seg-NNNNNN` of checksummed records. Shared by gyre-buffer (writes) and readers.

    record := magic "GYR1", u32 crc32 of the body, u64 length of the body, body
    body   := u32 number of frames, u64 length of each, the frames

Invariants
- A record is never changed; segments are deleted whole. A writer starts a new segment, so a torn tail of a killed predecessor is never appended to.
- `sync` returns when all that was appended is on disk; only then may anyone be told of it. Until then a thread writes, in the order of appending:
  what could not be written is raised by `sync`.
- A reader checks the checksum: bytes that rotted are `WorkFailed`, naming the file, never data.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gyre.errors import WorkFailed

_MAGIC: Final = b"GYR1"
_HEADER: Final = struct.Struct("<4sIQ")
_SEGMENT_BYTES: Final = 64 * 1024 * 1024
_OPEN_FILES: Final = 16
_IOV_MAX: Final = 512


class Place(msgspec.Struct, frozen=True):
    """Where a record is."""

    segment: int
    offset: int
    length: int


def _path(directory: Path, segment: int) -> Path:
    return directory / f"seg-{segment:06d}"


def _segments(directory: Path) -> list[int]:
    return sorted(int(p.name[4:]) for p in directory.glob("seg-*") if p.name[4:].isdigit())


class SegmentWriter:
    """Appends records. One writer per directory (the ledger's lock sees to that)."""

    def __init__(self, directory: Path, segment_bytes: int = _SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segment = max(_segments(directory), default=-1)
        self._fd = -1
        self._offset = 0
        self._thread = ThreadPoolExecutor(1, "payload")
        self._writes: list[Future[None]] = []
        self._syncing = False

    def append(self, frames: Sequence[bytes | memoryview]) -> Place:
        """Write a record of these frames (bytes; a memoryview must be cast to bytes), which must stay as they are until it is synced."""
        if self._fd < 0 or self._offset >= self._segment_bytes:
            self._rotate()
        lengths = struct.pack(f"<I{len(frames)}Q", len(frames), *(len(f) for f in frames))
        body = len(lengths) + sum(len(f) for f in frames)
        place = Place(self._segment, self._offset, _HEADER.size + body)
        self._writes.append(self._thread.submit(self._write, body, [lengths, *(f for f in frames if len(f))]))
        self._offset += place.length
        self._syncing = False
        return place

    def _write(self, body: int, frames: list[bytes | memoryview]) -> None:
        crc = 0
        for frame in frames:
            crc = zlib.crc32(frame, crc)
        views = [memoryview(b) for b in (_HEADER.pack(_MAGIC, crc, body), *frames)]
        while views:
            n = os.writev(self._fd, views[:_IOV_MAX])
            while views and n >= len(views[0]):
                n -= len(views.pop(0))
            if n:
                views[0] = views[0][n:]

    def _rotate(self) -> None:
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
        self._segment += 1
        self._fd = os.open(_path(self._directory, self._segment), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._offset = 0
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def finished(self) -> set[int]:
        """Segments that are not written to any more."""
        return {n for n in _segments(self._directory) if n != self._segment}

    def remove(self, segment: int) -> None:
        """Delete a finished segment; nobody may be told of its records any more."""
        _path(self._directory, segment).unlink(missing_ok=True)

    def begin_sync(self) -> None:
        """Have what was appended synced while something else is done."""
        if self._writes and not self._syncing:
            self._writes.append(self._thread.submit(os.fdatasync, self._fd))
            self._syncing = True

    def sync(self) -> None:
        """All appended records are on disk when this returns. Raises `OSError`: then nothing of them counts, and nothing may be appended any more."""
        self.begin_sync()
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def close(self) -> None:
        try:
            if self._fd >= 0:
                self.sync()
        finally:
            self._thread.shutdown()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class SegmentReader:
    """Reads records by place, also while they are being written. Not for use by several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[int, int] = {}

    def read(self, place: Place) -> list[memoryview]:
        """The frames of a record. Raises `WorkFailed` when the file is missing, short or rotten."""
        path = _path(self._directory, place.segment)
        try:
            data = os.pread(self._fd(place.segment), place.length, place.offset)
        except FileNotFoundError:
            raise WorkFailed(f"{path}: missing; the ledger refers to it") from None
        if len(data) != place.length or len(data) < _HEADER.size:
            raise WorkFailed(f"{path}: record at {place.offset} is cut short")
        magic, crc, length = _HEADER.unpack_from(data)
        body = memoryview(data)[_HEADER.size :]
        if magic != _MAGIC or length != len(body) or zlib.crc32(body) != crc:
            raise WorkFailed(f"{path}: record at {place.offset} is damaged (checksum)")
        (count,) = struct.unpack_from("<I", body)
        lengths = struct.unpack_from(f"<{count}Q", body, 4)
        frames, at = [], 4 + 8 * count
        for n in lengths:
            frames.append(body[at : at + n])
            at += n
        return frames

    def _fd(self, segment: int) -> int:
        if segment not in self._fds:
            if len(self._fds) >= _OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
            self._fds[segment] = os.open(_path(self._directory, segment), os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[segment]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
