"""What gyre-coord and gyre-doctor say before anything is started: whether there is a run, what the hosts file and the configuration lack."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from gyre_commands.coord import must_hold_a_run
from rich.console import Console

from gyre.config import Config, overlaid
from gyre.coord import doctor, hosts
from gyre.coord.hosts import Host, Kind
from gyre.errors import UsageError

CELLS = "buffer localhost\ncell localhost\ncell localhost\nsandbox localhost\n"
UNSET = "run.toml: not set: tasks.train (buffer); model.path (cell, sandbox)"


def gyre(folder: Path, command: str, *argv: str, cells: str = CELLS) -> subprocess.CompletedProcess[str]:
    (folder / "hosts.txt").write_text(cells)
    words = [sys.executable, "-m", f"gyre_commands.{command}", "--run", "run", "--cells", "hosts.txt", *argv]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_to_resume_there_must_be_a_run(tmp_path: Path) -> None:
    line = f"error: --run: {tmp_path}/run holds no run; leave --resume out, or give the directory of one\n"
    for there in (False, True):
        if there:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "run.toml").write_text("")
        done = gyre(tmp_path, "coord", "--resume")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.toml"]


def test_with_the_buffer_elsewhere_a_run_is_what_a_coordinator_left(tmp_path: Path) -> None:
    here, far = (hosts.parse(f"buffer {at}\nsandbox localhost\ncell localhost\n", "hosts.txt") for at in ("localhost", "login"))
    for lines, mark in ((here, "ledger.db"), (far, "logs")):
        with pytest.raises(UsageError, match="holds no run"):
            must_hold_a_run(tmp_path, lines)
        (tmp_path / mark).touch()
        must_hold_a_run(tmp_path, lines)


def test_all_that_is_not_set_is_named_at_once(tmp_path: Path) -> None:
    for argv in ([], ["--check"]):
        done = gyre(tmp_path, "coord", *argv)
        assert (done.returncode, done.stderr) == (2, f"error: {UNSET}; set what is named there, or with --set\n")
    assert not (tmp_path / "run").exists(), "nothing was started"
    for argv in ([], ["--check"]):
        done = gyre(tmp_path, "doctor", *argv)
        assert done.returncode == 1 and UNSET in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("cells", "sets", "missing"),
    [
        (CELLS, ["tasks.train=t", "model.path=m"], ""),
        (CELLS.replace("sandbox localhost", "sandbox localhost set.model.path=m"), ["tasks.train=t"], "model.path (cell)"),
        (CELLS, ["tasks.train=t", "model.path=m", "rollout.engine=scripted"], "rollout.script (cell)"),
        (CELLS, ["tasks.train=t", "rollout.engine=paced", "sandbox.backend=paced"], "model.path (cell); run.workload (cell, sandbox)"),
        (CELLS, [f"{x}=paced" for x in ("rollout.engine", "train.engine", "sandbox.backend")], "tasks.train (buffer); run.workload (cell, sandbox)"),
        ("buffer localhost\nsandbox localhost\ntrain-cell localhost\nrollout-cell localhost\n", ["rollout.engine=scripted"],
         "tasks.train (buffer); model.path (sandbox, train-cell); rollout.script (rollout-cell)"),
        ("buffer localhost\nsandbox localhost\ncell far\n", ["tasks.train=t"],
         "model.path (sandbox, cell); net.keys (hosts that talk over a network; gyre-keys makes them)"),
        ("buffer localhost\nsandbox localhost\ncell far\n", ["tasks.train=t", "model.path=m", "net.insecure=true"], ""),
    ],
)  # fmt: skip
def test_what_each_kind_needs(cells: str, sets: list[str], missing: str) -> None:
    assert doctor.unset(hosts.parse(cells, "hosts.txt"), overlaid(Config(), sets, "test")) == missing


@pytest.mark.parametrize("command", ["coord", "doctor"])
def test_check_reads_the_hosts_file(tmp_path: Path, command: str) -> None:
    given = ("--check", "--set", "tasks.train=t", "--set", "model.path=m")
    done = gyre(tmp_path, command, *given)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "configuration and hosts file ok\n")
    done = gyre(tmp_path, command, *given, cells=CELLS.replace("cell localhost\n", "cell localhost set.foo.bar=1\n", 1))
    assert (done.returncode, done.stderr) == (2, "error: hosts.txt:2: set.foo.bar: unknown key; docs/config.md lists the keys\n")
    done = gyre(tmp_path, command, *given, "--cells", "none.txt")
    assert done.returncode == 2 and done.stderr.startswith("error: none.txt: no such file"), done.stderr


def found() -> list[doctor.Health]:
    long = "gpu-of-the-long-named-rack-number-{}.cluster.example.org"
    return [
        doctor.Health(
            host=Host(long.format(n // 2), "operator", 2222), wants={Kind.BUFFER, Kind.CELL, Kind.SANDBOX}, reached=True, answer_s=0.5,
            python="3.11.9", gyre="0.1.0", torch="2.9.1+cpu", tools=["bwrap"], problems=["lacks /a/model/that/is/not/there and nowhere else"],
        )
        for n in range(4)
    ]  # fmt: skip


def test_problems_are_lines_and_names_are_whole() -> None:
    """At 80 columns two hosts look like two, and a problem that two interpreters of a host have is told once."""
    out = io.StringIO()
    Console(file=out, width=80).print(doctor.table(found()))
    names = [h.name for h in found()]
    column = "".join(line.split("  ")[0].strip() for line in out.getvalue().splitlines()[1:])
    assert all(name in column for name in names), out.getvalue()
    assert doctor.problems(found()) == [(f"{name}: lacks /a/model/that/is/not/there and nowhere else", True) for name in dict.fromkeys(names)]


def test_a_row_is_a_line_in_a_pipe(tmp_path: Path) -> None:
    done = gyre(tmp_path, "doctor", "--set", "tasks.train=/no/tasks/of/any/kind/in/this/place/that/has/a/long/name", "--set", "model.path=/no/model")
    head, row, *told = done.stdout.splitlines()
    assert head.split()[-1] == "problems" and row.startswith("localhost") and row.split()[-1].isdigit(), done.stdout
    assert "localhost: lacks /no/model" in told and len(told) == int(row.split()[-1]) == len(set(told))


def test_a_problem_is_a_line_on_a_terminal(tmp_path: Path) -> None:
    ours, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    (tmp_path / "hosts.txt").write_text(CELLS)
    words = [sys.executable, "-m", "gyre_commands.doctor", "--cells", "hosts.txt", "--set", "tasks.train=/no/tasks", "--set", "model.path=/no/model"]
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm", "NO_COLOR": "1"}
    child = subprocess.Popen(words, cwd=tmp_path, stdin=inner, stdout=inner, stderr=inner, env=env)
    os.close(inner)
    assert child.wait(120) == 1
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "localhost: lacks /no/model\r\n" in text and "localhost: lacks /no/tasks\r\n" in text, text
