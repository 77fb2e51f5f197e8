"""gyre-top beside a real run: on a terminal of 80 by 24, in a pipe, and when the run is over."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from whole_run import DEADLINE_S, RIGHT, WRONG, Run

CELLS = "buffer localhost\ncell localhost name=core\ncell localhost name=side\nsandbox localhost name=box\n"


def top(*argv: str | Path, columns: int = 80) -> str:
    words = [sys.executable, "-m", "gyre_commands.top", *map(str, argv)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": str(columns)})
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= columns and "\x1b" not in done.stdout
    return done.stdout


class Terminal:
    """gyre-top on a terminal of 80 by 24."""

    def __init__(self, run_dir: Path) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color", "NO_COLOR": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", "gyre_commands.top", str(run_dir)], stdin=inner, stdout=inner, stderr=inner, env=env)
        os.close(inner)
        self.seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._fd)

    def read(self) -> str:
        while select.select([self._fd], [], [], 0)[0]:
            try:
                self.seen += os.read(self._fd, 1 << 16)
            except OSError:  # its other end is closed
                break
        return self.seen.decode(errors="replace")

    def frames(self) -> list[list[str]]:
        """What was drawn, each from the upper left corner on, without control sequences."""
        drawn = self.read().split("\x1b[H")[1:]
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).replace("\r", "").rstrip("\n").split("\n") for frame in drawn]


def scrape(port: int) -> dict[str, list[Any]]:
    """Samples by name, read by the official parser."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, list[Any]] = {}
    for sample in (s for f in families for s in f.samples):
        found.setdefault(sample.name, []).append(sample)
    return found


def check_metrics(port: int) -> None:
    """One target for the whole run."""
    found = scrape(port)
    (admitted,) = found["gyre_admitted"]
    assert sum(s.value for s in found["gyre_executions"]) == admitted.value > 0
    assert {s.labels["state"] for s in found["gyre_groups"]} == {"open", "ready", "taken"}
    assert {s.labels["cell"] for s in found["gyre_rollout_tokens_s"]} <= {"core", "side"}
    assert len(found["gyre_water_level"]) == len(found["gyre_policy_version"]) == 1
    assert {"predicted", "mean"} <= {s.labels["of"] for s in found["gyre_staleness"]}
    assert {s.labels["process"] for s in found["gyre_process"]} >= {"coord", "buffer", "core-train", "side-rollout", "box"}
    assert {s.labels["process"]: s.value for s in found["gyre_buffer_refused_total"]} == {"buffer": 0.0}


def test_by_hand_each_has_its_own(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        taken = subprocess.run(run.argv("buffer", "--metrics-port", str(port)), capture_output=True, text=True, timeout=60, check=False)
        assert (taken.returncode, taken.stderr) == (
            2,
            f"error: --metrics-port: {port} cannot be listened at (Address already in use); give another port\n",
        )
    run.start("buffer", "--metrics-port", str(port))

    def answers() -> bool:
        try:
            return "gyre_admitted" in scrape(port)
        except OSError:
            return False

    run.until(answers, "the buffer's metrics")
    assert [s.labels["process"] for s in scrape(port)["gyre_buffer_strangers_total"]] == ["buffer"]


def test_beside_a_run_and_after_it(run: Run) -> None:
    run.script(RIGHT, WRONG, delay_s=0.1)
    (run.folder / "hosts.txt").write_text(CELLS)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    coord = run.start("coord", "--cells", str(run.folder / "hosts.txt"), "--metrics-port", str(port))
    run.until(lambda: (run.dir / "events.jsonl").exists() and '"kind":"step"' in (run.dir / "events.jsonl").read_text(), "the first step")
    check_metrics(port)
    with Terminal(run.dir) as screen:
        frame = top(run.dir)
        for shown in ("gyre run", "water level", "staleness predicted 1.00", "tokens/s", "core ", "side ", "box ", "rollout"):
            assert shown in frame, frame
        address = (run.dir / "coord.pid").read_text().rpartition(" at ")[2].strip()
        assert "water level" in top("--coord", address, columns=120)
        assert coord.wait(DEADLINE_S) == 0, run.log("coord")

        end = time.monotonic() + 60
        while screen.process.poll() is None and time.monotonic() < end:
            screen.read()
            time.sleep(0.1)
        assert screen.process.wait(1) == 0, "it ends with the run"
        frames, ended = screen.frames(), screen.read()
    assert len(frames) >= 2 and all(len(lines) <= 24 and max(map(len, lines)) <= 80 for lines in frames[:-1]), frames
    assert "\x1b[?1049l" in ended, "the terminal is as it was"
    after = top(run.dir)
    assert "finished after" in after and "32 consumed" in after and "step 4/4" in after, after
    assert subprocess.run([sys.executable, "-m", "gyre_commands.top", "--stall", str(run.dir)], capture_output=True, text=True,
                          timeout=60, check=True).stderr == "no stall so far\n"  # fmt: skip
