"""Record what each installed harness asks for: `python tests/harness/record.py [NAME…]` writes recordings/NAME-SCENARIO.json.gz.

A recording is a list of [path, redacted body, the text that the scripted engine sampled for it, null if the prompt did not fit].
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from driver import Drive, drive, is_call  # noqa: E402
from plays import PLAYS, Play  # noqa: E402
from redact import redact  # noqa: E402

RECORDINGS = HERE / "recordings"


def record(harness: str, play: Play, drove: Drive) -> None:
    asked = [r for r in drove.requests if is_call(r.path) and r.fault != "500"]
    sampled = [drove.said.get(call.call_id) for call in drove.calls]
    assert len(asked) == len(sampled), f"{len(asked)} requests, {len(sampled)} calls"
    rows = [[r.path, redact(r.json), text] for r, text in zip(asked, sampled, strict=True)]
    with gzip.GzipFile(RECORDINGS / f"{harness}-{play.name}.json.gz", "wb", mtime=0) as file:
        file.write(json.dumps(rows, ensure_ascii=False).encode())


if __name__ == "__main__":
    RECORDINGS.mkdir(exist_ok=True)
    for play in PLAYS:
        if len(sys.argv) < 2 or play.harness in sys.argv[1:] or f"{play.harness}-{play.name}" in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as directory:
                drove = drive(Path(directory), f"preset:{play.harness}", play.say, fault=play.fault, **play.keys)
            trained, sampled = drove.coverage()
            classes = sorted({c.leaf_class.value for c in drove.calls})
            cell = f"{len(drove.calls)}: {trained} of {sampled}"  # as in docs/harness.md
            print(play.harness, play.name, drove.ended.message.ending, drove.ended.message.reward, "|", cell, "|", f"{drove.seconds:.1f} s", *classes)
            record(play.harness, play, drove)
