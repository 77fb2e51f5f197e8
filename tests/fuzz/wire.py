"""Messages that a coverage-guided fuzzer makes up, at servers of every kind with what really stands behind them: taken, refused or dropped, and never
an exception; the buffer's counts add up after each.

`pip install atheris`, then `python tests/fuzz/wire.py [SECONDS] [FOLDER]`. The corpus is kept in FOLDER, as is the input that failed. The first byte
of an input says for whom it is and how it is read: as the frames themselves, or as the choices of the strategies of `hostile`, which make of them
messages that are nearly right.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "net")]
with atheris.instrument_imports(include=["gyre"]):
    from hostile import TO, Victim, frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.wire.speakers import KINDS, MAY

PER_SERVER = 3000
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a ledger that needs no disk is a quick one


class Fuzz:
    """What atheris calls with each input."""

    def __init__(self) -> None:
        self.victims = {kind: self._victim(kind) for kind in TO}
        self.nearly_right = {kind: self._strategy(kind) for kind in TO}
        self.counts = dict.fromkeys(TO, 0)
        self.passed = 0

    @staticmethod
    def _victim(kind: str) -> Victim:
        return Victim(kind, Path(tempfile.mkdtemp(prefix="gyre-fuzz-")))

    def _strategy(self, kind: str) -> Any:
        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(list(MAY[kind])).flatmap(lambda speaker: st.tuples(st.just(speaker), frames(MAY[kind][speaker]))))
        def one(said: tuple[str, list[Any]]) -> None:
            self._take(kind, *said)

        return one.hypothesis.fuzz_one_input  # type: ignore[attr-defined]

    def _take(self, kind: str, speaker: str, message: list[Any]) -> None:
        self.passed += self.victims[kind].take(speaker, message)
        self.counts[kind] += 1
        if self.counts[kind] % PER_SERVER == 0:
            self.victims[kind].close()
            self.victims[kind] = self._victim(kind)

    def __call__(self, data: bytes) -> None:
        if len(data) < 3:
            return
        kind = list(TO)[data[0] % len(TO)]
        if data[0] & 0x80:
            at = 3 + data[2] % max(1, len(data) - 3)
            self._take(kind, KINDS[data[1] % len(KINDS)], [data[3:at], data[at:]] if data[2] & 1 else [data[3:]])
        else:
            self.nearly_right[kind](data[1:])


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="gyre-fuzz-"))
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)
    argv = [sys.argv[0], str(folder / "corpus"), f"-artifact_prefix={folder}/", f"-max_total_time={seconds}"]
    argv += ["-max_len=4096", "-len_control=0", "-timeout=120"]
    print(f"gyre-fuzz: {seconds} s, corpus and failures in {folder}", file=sys.stderr)
    atheris.Setup(argv, Fuzz())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
