"""A run directory whose disk is full: the buffer ends and says so; with room again the run goes on, and nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_run import Run, step_groups

STEPS = 6


@pytest.fixture
def small(run: Run) -> Iterator[Path]:
    """The run directory is a disk of its own, of 64 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    run.dir.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(run.dir)], capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield run.dir
    subprocess.run(["umount", "-l", str(run.dir)], check=True, timeout=60)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as f:
        size = 1 << 20
        while size:
            try:
                f.write(b"\0" * size)
            except OSError:
                size //= 2


def test_with_room_again_it_goes_on(run: Run, small: Path) -> None:
    run.config.write_text(run.config.read_text().replace("steps = 4", f"steps = {STEPS}"))
    ballast = small / "ballast"
    run.start("coord", "--cells", str(run.folder / "hosts.txt"))
    run.until(lambda: (small / "ledger.db").exists() and len(run.dump("--kind", "steps")) >= 2, "the second step")
    fill(ballast)
    run.until(lambda: "buffer ended with exit code 1" in run.log("coord"), "a buffer that cannot write")
    ballast.unlink()
    run.wait("coord")
    last = (run.dir / "logs" / "buffer.log").read_text()
    assert "the ledger cannot be written (database or disk is full)" in last and "Traceback" not in last
    assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, STEPS + 1))
    groups = step_groups(run)
    assert len(groups) == len(set(groups)) == 2 * STEPS
