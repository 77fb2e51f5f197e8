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


def go_on(far: Far, coord: subprocess.Popen[bytes]) -> None:
    far.until_step(coord, len(far.run.dump("--kind", "steps")) + 1)


def complete(far: Far, coord: subprocess.Popen[bytes]) -> None:
    """Stop in order, resume for two more steps; the accounts are exact."""
    coord.send_signal(signal.SIGINT)
    far.wait(coord, 130)
    steps = len(far.run.dump("--kind", "steps")) + 2
    far.wait(far.start("--resume", "--steps", str(steps)))
    far.check(steps)


def test_any_two_nodes_are_cut_off_from_each_other(far: Far) -> None:
    far.run.script(RIGHT, WRONG, delay_s=0.02)
    coord = far.start("--steps", "10000")
    far.until_step(coord, 1)
    for both_ways, seconds in ((False, SHORT_S), (True, LONG_S)):
        for pairs in ROUNDS:
            ways = [*pairs, *((b, a) for a, b in pairs if both_ways)]
            for source, sink in ways:
                far.cluster.cut(source, sink, there=False)
            time.sleep(seconds)
            for source, sink in ways:
                far.cluster.cut(source, sink, there=True)
            if both_ways:
                go_on(far, coord)
    complete(far, coord)


def test_each_process_stands_still_longer_than_any_lease(far: Far) -> None:
    """SIGSTOP and SIGCONT: a zombie finds that its lease was given to another, and what it brings under it is refused."""
    run = far.run
    run.script(RIGHT, WRONG, delay_s=0.05)
    coord = far.start("--steps", "10000")
    far.until_step(coord, 1)
    for name in ("sandbox0", "buffer", "a-train", "b-rollout", "b-train", "coord"):
        pid = coord.pid if name == "coord" else run.pid_of(name)
        assert pid is not None, name
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        lost = {e["fields"]["holder"] for e in run.dump("--kind", "events") if e["kind"] == "lease_lost"}  # type: ignore[index]
        os.kill(pid, signal.SIGCONT)
        if name == "sandbox0":
            assert any(holder.startswith("sandbox0/") for holder in lost), lost
        go_on(far, coord)
        assert name == "coord" or run.pid_of(name) == pid, f"{name} was alive, and is there still"
    refused = (run.dir / "node" / "sandbox0" / "log").read_text()
    assert " is lost" in refused or "was refused: " in refused, refused[-4000:]
    complete(far, coord)
