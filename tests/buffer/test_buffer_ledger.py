"""Disk: rows, payload segments, the event log, the lock."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from gyre.buffer.ledger import Ledger, file_system, refuse_network
from gyre.errors import Busy, UsageError, WorkFailed
from gyre.events import Event, EventReader, EventWriter, encode
from gyre.types import Ending, Purpose
from gyre.wire.messages import RolloutEnded
from gyre.wire.payload import parse
from gyre.wire.rows import ROWS, Codec, Item, MetaRow, RolloutRow
from gyre.wire.segments import Place, SegmentReader, SegmentWriter


def line(seq: int) -> tuple[int, str]:
    return seq, encode(Event(seq=seq, t_wall=1.0, t_mono=1.0, proc="buffer", cause="", kind="k", fields={"seq": seq}))


def rollout(**keys) -> RolloutRow:
    return RolloutRow("g0.0", "g0", "q0", Purpose.TRAIN, 0, "/t", 2**62, 1, 0, 0, 1.5, **keys)


def test_rows_survive_sql():
    db = sqlite3.connect(":memory:")
    for row in ROWS:
        db.execute(Codec(row).create)
    codec = Codec(RolloutRow)
    row = rollout(ending=Ending.FINISHED, reward=0.1, items=[Item("g0.0", 0, 5, 2)], rewards={"a": 1.0}, cells=["x"])
    db.execute(codec.put, codec.values(row))
    assert list(codec.select(db)) == [row]
    db.close()


def test_an_older_ledger_gains_the_columns_it_lacks(tmp_path):
    Ledger(tmp_path).close()
    db = sqlite3.connect(tmp_path / "ledger.db")
    db.execute("ALTER TABLE meta DROP COLUMN discards")
    db.execute("INSERT INTO meta (id, schema, run_id) VALUES (0, 1, 'old')")
    db.commit()
    db.close()
    ledger = Ledger(tmp_path)
    (meta,) = ledger.rows()
    assert isinstance(meta, MetaRow) and (meta.run_id, meta.discards) == ("old", {})
    ledger.close()


def test_a_batch_is_there_after_its_commit_and_nothing_of_another(tmp_path):
    ledger = Ledger(tmp_path)
    row = rollout()
    message = RolloutEnded(id="m", rollout_id="g0.0", epoch=0, ending=Ending.FINISHED)
    arrays = {k: memoryview(b"").cast(f) for k, f in (("token_ids", "i"), ("logprobs", "f"), ("versions", "i"))}
    ledger.store(row, message, arrays)
    ledger.commit([row], [], [line(0)]).result()
    ledger.store(rollout(), message, arrays)  # never committed
    other = sqlite3.connect(f"file:{tmp_path}/ledger.db?mode=ro", uri=True)
    assert [r.length for r in Codec(RolloutRow).select(other)] == [row.length]
    other.close()
    ledger.close()
    ledger = Ledger(tmp_path)
    assert list(ledger.rows()) == [row] and ledger.next_seq == 1
    place = Place(row.segment or 0, row.offset, row.length)
    assert parse(ledger.payloads.read(place))[0] == message
    ledger.commit([], [row], []).result()
    assert list(ledger.rows()) == []
    ledger.close()


def test_event_lines_that_a_kill_kept_from_the_log_are_written_at_the_next_start(tmp_path):
    ledger = Ledger(tmp_path / "run")
    ledger.commit([], [], [line(0), line(1)]).result()
    ledger.commit([], [], [line(2)]).result()
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "run", killed)  # the files as a kill leaves them, but
    log = killed / "events.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: len(whole) // 2])  # with a line and a half in the log
    again = Ledger(killed)
    assert log.read_bytes() == whole and again.next_seq == 3
    again.close()
    ledger.close()


def test_a_torn_tail_of_the_log_is_left_alone_by_readers_and_mended_by_the_writer(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    writer.write([line(0), line(1)])
    writer.close()
    with path.open("ab") as f:
        f.write(b'{"schema":"gyre.ev')
    reader = EventReader(path)
    assert [e.seq for e in reader.events()] == [0, 1]
    writer = EventWriter(path)
    assert writer.last_seq == 1
    writer.write([line(2)])
    writer.close()
    assert [e.seq for e in reader.events()] == [2]
    assert list(EventReader(tmp_path / "none").events()) == []


@pytest.mark.parametrize("line", [b'{"seq": "one"}\n', b"\xff\xfe\x00\n", b"\n"])
def test_a_damaged_event_log_is_one_line(tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    good = encode(Event(seq=0, t_wall=0.0, t_mono=0.0, proc="b", cause="", kind="k")).encode() + b"\n"
    path.write_bytes(good + line)
    with pytest.raises(UsageError, match="its last line is damaged"):
        EventWriter(path)
    assert [e.seq for e in EventReader(path).events()] == [0] and "left out 1 damaged lines" in caplog.text


def test_a_log_of_one_torn_line_starts_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"schema"')
    writer = EventWriter(path)
    assert writer.last_seq == -1 and path.read_bytes() == b""
    writer.close()


def test_segments_rotate_and_a_new_writer_leaves_old_tails_alone(tmp_path):
    writer = SegmentWriter(tmp_path, segment_bytes=64)
    places = [writer.append([b"a" * n, b"", memoryview(b"xy")]) for n in range(40)]
    writer.cut()()
    torn = max(p.segment for p in places)
    with (tmp_path / f"seg-{torn:06d}").open("ab") as f:
        f.write(b"GYR2half a rec")
    writer.close()
    second = SegmentWriter(tmp_path, segment_bytes=64)
    last = second.append([b"new"])
    second.close()
    assert last.segment == torn + 1
    reader = SegmentReader(tmp_path)
    assert [[bytes(f) for f in reader.read(p)] for p in places] == [[b"a" * n, b"", b"xy"] for n in range(40)]
    reader.close()


def test_what_the_kernel_takes_in_parts_is_whole(tmp_path, monkeypatch):
    """Long and many frames, and writes that end where they like: nothing is lost or moved, and no write is long."""
    rng, asked, whole = random.Random(5), [], os.writev

    def some(fd, views):
        asked.append(sum(map(len, views)))
        data = b"".join(views)
        return whole(fd, [data[: rng.choice([1, 100, 1 << 17, len(data), len(data)])]])

    monkeypatch.setattr(os, "writev", some)
    writer = SegmentWriter(tmp_path)
    edge = 1 << 17
    records = [[rng.randbytes(n) for n in sizes] for sizes in ([edge - 1, edge, edge + 1], [3_000_007], [7] * 2000, [0, 1, 0], [2 << 20] * 3)]
    places = [writer.append(r) for r in records]
    writer.cut()()
    writer.close()
    reader = SegmentReader(tmp_path)
    assert [[bytes(f) for f in reader.read(p)] for p in places] == records
    reader.close()
    assert max(asked) <= 1 << 20 and len(asked) > 10


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_payload_is_named_and_never_returned(tmp_path, damage):
    writer = SegmentWriter(tmp_path)
    place = writer.append([b"payload" * 10])
    writer.cut()()
    writer.close()
    path = tmp_path / "seg-000000"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    reader = SegmentReader(tmp_path)
    with pytest.raises(WorkFailed, match="seg-000000"):
        reader.read(place)
    reader.close()


def test_a_second_ledger_is_busy(tmp_path):
    ledger = Ledger(tmp_path)
    with pytest.raises(Busy, match=r"pid \d+"):
        Ledger(tmp_path)
    ledger.close()
    Ledger(tmp_path).close()


def test_a_file_that_is_no_ledger_is_bad_input(tmp_path):
    (tmp_path / "ledger.db").write_text("not a database, and long enough to be looked at" * 50)
    with pytest.raises(UsageError, match=r"ledger\.db"):
        Ledger(tmp_path)


MOUNTS = r"""
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
40 22 0:50 / /home rw - nfs4 server:/home rw
41 40 0:51 / /home/me/scratch rw shared:1 - xfs /dev/sdb rw
42 22 0:52 / /my\040disk rw - cifs //x/y rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/var/run1", "ext4"), ("/home/you/run", "nfs4"), ("/home/me/scratch/run", "xfs"), ("/my disk/run", "cifs"), ("/homely", "ext4")],
)
def test_network_file_systems_are_refused_by_name(path, kind):
    assert file_system(Path(path), MOUNTS) == kind
    if kind in ("nfs4", "cifs"):
        with pytest.raises(UsageError, match=kind):
            refuse_network(Path(path), kind)
    else:
        refuse_network(Path(path), kind)
