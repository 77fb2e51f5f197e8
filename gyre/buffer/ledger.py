"""The durable ledger of a run: `ledger.db` (SQLite, WAL, synchronous=FULL) and `payload/`. Only gyre-buffer writes it.

Invariants
- A `commit` is done when everything given to it is on disk: payload records are synced first, then the rows that point at them are committed together
  with the event lines, in one transaction, by a thread. A kill at any moment loses nothing of a batch whose `commit` is done, and of another leaves
  all or nothing.
- One commit is under way at a time. Whoever uses the database otherwise waits for it.
- Event lines travel through the table `outbox`: what the file lacks after a kill is written at the next start, nothing twice.
- One process at a time: a lock beside the ledger, held for life, which names its holder's pid. No network file system, whose locks and syncs lie.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from gyre.errors import Busy, UsageError
from gyre.events import EventWriter
from gyre.types import RolloutState
from gyre.wire.arrays import Array
from gyre.wire.codec import encode
from gyre.wire.messages import RolloutEnded
from gyre.wire.rows import INDICES, OUTBOX, ROWS, Codec, GroupRow, MetaRow, MicroStepRow, PublicationRow, QueryRow, RolloutRow, Row, StepRow
from gyre.wire.segments import SegmentReader, SegmentWriter

_NETWORK: Final = frozenset(
    (
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2", "ocfs2",
        "gfs2", "panfs", "fuse.ceph", "fuse.cephfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs",
    )
)  # fmt: skip
_SYNC_EVENTS_S: Final = 2.0


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mountinfo; "" where that cannot be told."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    where, best, kind = path.resolve(), -1, ""
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:
            continue
        mount = Path(fields[4].replace("\\040", " "))
        if (where == mount or mount in where.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


def refuse_network(path: Path, kind: str) -> None:
    """Raise `UsageError` when `kind` is a network file system."""
    if kind in _NETWORK:
        raise UsageError(
            str(path), f"lies on a network file system ({kind}), where locks and syncs are not to be trusted", "give --run on a local disk"
        )


def _lock(run_dir: Path) -> int:
    path = run_dir / "ledger.lock"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise Busy(f"{run_dir}: another gyre-buffer (pid {holder}) has this run; stop it or give another --run") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


class Ledger:
    """Opened once per life of the buffer; see the module."""

    def __init__(self, run_dir: Path) -> None:
        """Open or create. Raises `UsageError` (unwritable, network file system) and `Busy` (held by another process)."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_network(run_dir, file_system(run_dir))
            self._lock = _lock(run_dir)
        except OSError as e:
            raise UsageError(str(run_dir), f"the run directory cannot be written ({e.strerror})", "make it writable or give another --run") from None
        try:
            self._open(run_dir)
        except (OSError, sqlite3.Error) as e:
            os.close(self._lock)
            raise UsageError(str(run_dir / "ledger.db"), f"cannot be opened ({e})", "mend it or give another --run") from None

    def _open(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._codecs: dict[type[Row], Codec[Any]] = {row: Codec(row) for row in ROWS}
        self._db = sqlite3.connect(run_dir / "ledger.db", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA wal_autocheckpoint=4000")
        self._db.execute("BEGIN IMMEDIATE")
        for codec in self._codecs.values():
            self._db.execute(codec.create)
            self._add_columns(codec)
        for statement in (*INDICES, OUTBOX):
            self._db.execute(statement)
        self._db.execute("COMMIT")
        self._writer = SegmentWriter(run_dir / "payload")
        self._reader = SegmentReader(run_dir / "payload")
        self._events = EventWriter(run_dir / "events.jsonl")
        self._events.replay(self._db.execute("SELECT seq, line FROM outbox ORDER BY seq"))
        last: int | None = self._db.execute("SELECT max(seq) FROM outbox").fetchone()[0]
        self.next_seq = max(self._events.last_seq, -1 if last is None else last) + 1
        self._synced_at = 0.0
        self._unsynced = True
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._under_way: Future[None] | None = None
        self._committed = -1  # segments before this one hold nothing that the last commit did not

    def _add_columns(self, codec: Codec[Any]) -> None:
        """Give an older ledger's table the columns that were added since."""
        have = {r[1] for r in self._db.execute(f"PRAGMA table_info({codec.row.TABLE})")}
        for name, definition in codec.definitions.items():
            if name not in have:
                self._db.execute(f"ALTER TABLE {codec.row.TABLE} ADD COLUMN {definition}")

    def rows(self) -> Iterator[Row]:
        """The rows that a machine is built from: those that it would not have forgotten (`State.forget`)."""
        meta = next(self._codecs[MetaRow].select(self._db), MetaRow())
        groups = f"SELECT group_id FROM groups WHERE state = 'discarded' OR (state = 'consumed' AND step <= {meta.settled})"
        evals = "SELECT eval_id FROM evals WHERE void OR completed_at IS NOT NULL"
        where: dict[type[Row], str] = {
            QueryRow: "WHERE purpose = 'eval'",
            GroupRow: f"WHERE group_id NOT IN ({groups})",
            RolloutRow: f"WHERE group_id NOT IN ({groups} UNION {evals})",
            StepRow: f"WHERE step >= {meta.settled}",
            MicroStepRow: "WHERE state != 'committed'",
            PublicationRow: "WHERE number = (SELECT max(number) FROM publications)",
        }
        for row, codec in self._codecs.items():
            yield from codec.select(self._db, where.get(row, ""))

    def rows_from(self, step: int) -> Iterator[Row]:
        """Committed steps from this one on, and what those behind it consumed. Waits for a commit under way."""
        self._settle()
        groups = f"state = 'consumed' AND step > {step}"
        yield from self._codecs[StepRow].select(self._db, f"WHERE state = 'committed' AND step >= {step}")
        yield from self._codecs[GroupRow].select(self._db, f"WHERE {groups}")
        yield from self._codecs[RolloutRow].select(self._db, f"WHERE group_id IN (SELECT group_id FROM groups WHERE {groups})")

    def counts(self) -> dict[RolloutState, int]:
        """Executions by state, evaluation aside."""
        return {RolloutState(k): n for k, n in self._db.execute("SELECT state, count(*) FROM rollouts WHERE purpose = 'train' GROUP BY state")}

    def store(self, row: RolloutRow, message: RolloutEnded, arrays: Mapping[str, Array]) -> None:
        """Append an execution's payload and write its place into the row. Durable at the next commit."""
        place = self._writer.append(encode(message, arrays))
        row.segment, row.offset, row.length = place.segment, place.offset, place.length

    @property
    def payloads(self) -> SegmentReader:
        return self._reader

    def commit(self, puts: Iterable[Row], drops: Iterable[Row], lines: list[tuple[int, str]]) -> Future[None]:
        """Make durable what was stored and these rows, as they are now, then append the event lines to the log. The one before must be done."""
        self._settle()
        values: dict[type[Row], list[list[Any]]] = {}
        for row in puts:
            values.setdefault(type(row), []).append(self._codecs[type(row)].values(row))
        statements = [(self._codecs[table].put, rows) for table, rows in values.items()]
        statements += [(self._codecs[type(row)].drop, [list(row.key)]) for row in drops]
        if lines:
            statements.append(("INSERT OR REPLACE INTO outbox VALUES (?, ?)", [list(line) for line in lines]))
        self._committed = self._writer.current
        self._under_way = self._thread.submit(self._commit, self._writer.cut(), statements, lines)
        return self._under_way

    def _commit(self, sync: Callable[[], None], statements: list[tuple[str, list[list[Any]]]], lines: list[tuple[int, str]]) -> None:
        sync()
        if statements:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                self._db.executemany(statement, rows)
            self._trim()
            self._db.execute("COMMIT")
        self._events.write(lines)
        self._unsynced = self._unsynced or bool(lines)

    def _settle(self) -> None:
        """Wait for the commit under way. Raises what became of it."""
        if self._under_way is not None:
            self._under_way.result()

    def prune(self, step: int) -> None:
        """Remove the segments in which there is no payload that may be trained again: none of a group that a step after this one has or may take."""
        self._settle()
        groups = f"SELECT group_id FROM groups WHERE step > {step} OR (step IS NULL AND state != 'discarded')"
        evals = "SELECT eval_id FROM evals WHERE completed_at IS NULL AND NOT void"
        wanted = {n for (n,) in self._db.execute(f"SELECT DISTINCT segment FROM rollouts WHERE group_id IN ({groups} UNION ALL {evals})")}
        for segment in self._writer.before(self._committed) - wanted:
            self._db.execute("UPDATE rollouts SET segment = NULL WHERE segment = ?", (segment,))
            self._reader.close()  # else the file stays for as long as it is open
            self._writer.remove(segment)

    def _trim(self) -> None:
        """Now and then, inside a transaction: what is safe in the event log leaves the outbox."""
        if self._unsynced and time.monotonic() - self._synced_at > _SYNC_EVENTS_S:
            self._events.sync()
            self._db.execute("DELETE FROM outbox WHERE seq <= ?", (self._events.last_seq,))
            self._synced_at, self._unsynced = time.monotonic(), False

    def close(self) -> None:
        self._thread.shutdown()
        self._writer.close()
        self._reader.close()
        with contextlib.suppress(OSError, sqlite3.Error):  # a full disk: nothing is lost, the next start looks at those lines again
            self._events.sync()
            self._db.execute("DELETE FROM outbox WHERE seq <= ?", (self._events.last_seq,))
        self._db.close()
        self._events.close()
        os.close(self._lock)
