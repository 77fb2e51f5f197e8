"""Payload segments: append-only files `payload/seg-NNNNNN` of checksummed records. Shared by gyre-buffer (writes) and readers.

    record := magic "GYR2", u64 XXH3-64 of the body, u64 length of the body, body
    body   := u32 number of frames, u64 length of each, the frames

Invariants
- A record is never changed; segments are deleted whole. A writer starts a new segment, so a torn tail of a killed predecessor is never appended to.
- Nothing is written but by what `cut` gives: when it returns, all that was appended before is on disk; only then may anyone be told of it.
- A reader checks the checksum: bytes that rotted are `WorkFailed`, naming the file, never data.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
import xxhash

from gyre.errors import WorkFailed

_MAGIC: Final = b"GYR2"
_HEADER: Final = struct.Struct("<4sQQ")
_SEGMENT_BYTES: Final = 64 * 1024 * 1024
_OPEN_FILES: Final = 16
_IOV_MAX: Final = 512
_PIECE: Final = 128 << 10
_AT_ONCE: Final = 1 << 20  # bytes of a write: of a longer one the kernel makes huge folios, which a virtual machine may have to ask its host for
_libc: Final = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE: Final = 2  # <fcntl.h>
Body = list[bytes | memoryview]


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
        self._offset = 0
        self._records: list[list[Body]] = [[]]  # since the last cut: what goes to each segment, the current one's last
        self._fds: list[int] = [-1]  # of these segments

    def append(self, frames: Sequence[bytes | memoryview]) -> Place:
        """Add a record of these frames (bytes; a memoryview must be cast to bytes), which must stay as they are until it is on disk."""
        if self._fds[-1] < 0 or self._offset >= self._segment_bytes:
            self._rotate()
        lengths = struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames))
        self._records[-1].append([lengths, *(f for f in frames if len(f))])
        place = Place(self._segment, self._offset, _HEADER.size + len(lengths) + sum(map(len, frames)))
        self._offset += place.length
        return place

    def _rotate(self) -> None:
        self._segment += 1
        self._fds.append(os.open(_path(self._directory, self._segment), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        self._records.append([])
        self._offset = 0

    def cut(self) -> Callable[[], None]:
        """What is called, once and in the order of the cuts, from any thread, to have all on disk that was appended since the last cut. It raises
        `OSError`: then nothing of it counts, and nothing may be appended any more."""
        records, fds = self._records, self._fds
        self._records, self._fds = [[]], fds[-1:]
        return lambda: self._write(records, fds)

    def _write(self, records: list[list[Body]], fds: list[int]) -> None:
        for fd, of_segment in zip(fds, records, strict=True):
            if of_segment:
                _write_all(fd, [piece for body in of_segment for piece in (_header(body), *body)])
                os.fdatasync(fd)
        for fd in fds[:-1]:
            if fd >= 0:
                os.close(fd)
        if len(fds) > 1:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    @property
    def current(self) -> int:
        """The segment that the next record goes to, or an earlier one."""
        return self._segment

    def before(self, segment: int) -> set[int]:
        """The segments that are older than this one."""
        return {n for n in _segments(self._directory) if n < segment}

    def remove(self, segment: int) -> None:
        """Delete a segment; nobody may be told of its records any more."""
        _path(self._directory, segment).unlink(missing_ok=True)

    def close(self) -> None:
        for fd in self._fds:  # what was not cut is nobody's: its rows will never be committed
            if fd >= 0:
                os.close(fd)
        self._fds, self._records = [-1], [[]]


def _begin_to_sync(fd: int) -> None:
    """Where the C library can; it is no promise, and its failure is fdatasync's to tell."""
    with contextlib.suppress(AttributeError):
        _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)  # of all of it


def _header(body: Body) -> bytes:
    checksum = xxhash.xxh3_64()
    for piece in body:
        checksum.update(piece)
    return _HEADER.pack(_MAGIC, checksum.intdigest(), sum(map(len, body)))


def _write_all(fd: int, pieces: Body) -> None:
    views = [memoryview(piece)[i : i + _PIECE] for piece in pieces for i in range(0, len(piece), _PIECE)]
    at = 0
    while at < len(views):
        end, size = at, 0
        while end < len(views) and end - at < _IOV_MAX and (size := size + len(views[end])) <= _AT_ONCE:
            end += 1
        n = os.writev(fd, views[at:end])
        while at < end and n >= len(views[at]):
            n -= len(views[at])
            at += 1
        if n:
            views[at] = views[at][n:]
        if at < len(views):  # the disk has something to do meanwhile
            _begin_to_sync(fd)


class SegmentReader:
    """Reads records by place, also while they are being written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[int, int] = {}
        self._lock = Lock()  # of the descriptors

    def read(self, place: Place) -> list[memoryview]:
        """The frames of a record. Raises `WorkFailed` when the file is missing, short or rotten."""
        path = _path(self._directory, place.segment)
        try:
            with self._lock:
                data = os.pread(self._fd(place.segment), place.length, place.offset)
        except FileNotFoundError:
            raise WorkFailed(f"{path}: missing; the ledger refers to it") from None
        if len(data) != place.length or len(data) < _HEADER.size:
            raise WorkFailed(f"{path}: record at {place.offset} is cut short")
        magic, checksum, length = _HEADER.unpack_from(data)
        if magic == b"GYR1":
            raise WorkFailed(f"{path}: written by an older gyre, whose checksums this one does not know")
        body = memoryview(data)[_HEADER.size :]
        if magic != _MAGIC or length != len(body) or xxhash.xxh3_64_intdigest(body) != checksum:
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
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
