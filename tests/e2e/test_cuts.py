"""A run on four nodes in which any two are cut off from each other, one way and both ways, and each process stands still longer than any lease.

Each disturbance ends, and the run must go on: what is waited for then is a step that was not there before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

from test_nodes import Far, cluster, far
from whole_run import RIGHT, WRONG

__all__ = ["cluster", "far"]

NODES = ("login", "node1", "node2", "node3", "node4")  # buffer and coordinator, the core's cell, another, sandboxes
ROUNDS = [[(NODES[(n + a) % 5], NODES[(n - a) % 5]) for a in (1, 2)] for n in range(5)]
"""All pairs, two at a time that have no node in common."""
SHORT_S, LONG_S, STOPPED_S = 1.0, 10.0, 7.0  # leases are 3 s, claims 5 s, an engine is given up after 4 s
STOPPED = (("sandbox0", "b-train"), ("buffer",), ("a-train", "coord"), ("b-rollout",))


def test_cut_off_from_each_other_and_standing_still(far: Far) -> None:
    """SIGSTOP and SIGCONT make a zombie: it finds that its lease was given to another, and what it brings under it is refused. In the end the run is
    stopped, resumed for two more steps and completed; the accounts are exact."""
    far.run.script(RIGHT, WRONG, delay_s=0.03)
    coord = far.start("--steps", "10000")
    far.until_step(coord, 1)
    for pairs in ROUNDS:
        cut(far, pairs, SHORT_S)
    for pairs in ROUNDS:
        cut(far, [*pairs, *((b, a) for a, b in pairs)], LONG_S)
        far.until_step(coord, steps(far) + 1)
    for names in STOPPED:
        stand_still(far, coord, names)
        far.until_step(coord, steps(far) + 1)
    lost = {e["fields"]["holder"] for e in far.run.dump("--kind", "events") if e["kind"] == "lease_lost"}  # type: ignore[index]
    assert any(holder.startswith("sandbox0/") for holder in lost), lost
    refused = (far.run.dir / "node" / "sandbox0" / "log").read_text()
    assert " is lost" in refused or "was refused: " in refused, refused[-4000:]

    coord.send_signal(signal.SIGINT)
    far.wait(coord, 130)
    wanted = steps(far) + 2
    far.wait(far.start("--resume", "--steps", str(wanted)))
    far.check(wanted)


def steps(far: Far) -> int:
    return len(far.run.dump("--kind", "steps"))


def cut(far: Far, ways: list[tuple[str, str]], seconds: float) -> None:
    for source, sink in ways:
        far.cluster.cut(source, sink, there=False)
    time.sleep(seconds)
    for source, sink in ways:
        far.cluster.cut(source, sink, there=True)


def stand_still(far: Far, coord: subprocess.Popen[bytes], names: tuple[str, ...]) -> None:
    pids = {name: coord.pid if name == "coord" else far.run.pid_of(name) or 0 for name in names}
    assert all(pids.values()), pids
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids.values():
        os.kill(pid, signal.SIGCONT)
