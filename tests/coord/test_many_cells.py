"""Many cells at one coordinator, over real sockets: all are told what to be, bursts turn some of them, and nobody is told too much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench" / "fleet.py"


def test_200_cells_at_one_coordinator() -> None:
    seconds = 25.0
    command = [sys.executable, str(BENCH), "--cells", "200", "--settle", "5", "--seconds", str(seconds - 5)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    told = json.loads(done.stdout)
    assert told["orders"] >= 400, "each engine and each trainer has had an order"
    assert told["orders"] <= 400 * 6, "orders are for those who are to change"
    assert 1 <= told["routes_per_sandbox"] <= 2 * seconds, "a sandbox gets the table when it beats, not at each change of one of 200 cells"
    assert told["mib"][1] < 2 * told["mib"][0]
