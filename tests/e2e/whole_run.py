"""Whole runs with real processes: a tiny model, tasks of one line, the quick start's harness, a scripted or a real engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
DEADLINE_S = 240.0

CONFIG = """
[model]
path = "{model}"
device = "cpu"
[tasks]
train = "{tasks}"
heldout = "{tasks}"
eval_every = 100
eval_tasks = 2
[system]
groups_per_step = 2
rollouts_per_group = 4
[rollout]
engine = "scripted"
script = "script.jsonl"
max_tokens = 64
context = 512
threads = 1
[sandbox]
backend = "{backend}"
unsafe = {unsafe}
slots = 4
harness_dir = "agent"
harness_timeout_s = 60
verifier_timeout_s = 60
lease_ttl_s = 3
workspace_mb = 16
[train]
steps = 4
lr = 1e-4
threads = 1
claim_ttl_s = 5
checkpoint_every = 2
[net]
resend_s = 0.5
"""
HOSTS = "buffer localhost\ntrain-cell localhost name=core\nrollout-cell localhost name=cell0\nsandbox localhost name=box\n"
RIGHT = '<tool_call>\n{"name": "write_file", "arguments": {"path": "done.txt", "content": "ok"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "write_file", "arguments": {"path": "done.txt", "content": "no"}}\n</tool_call>'


def backend() -> str:
    """bubblewrap where it is; else the process backend, unless GYRE_REQUIRE forbids it."""
    if shutil.which("bwrap"):
        return "bubblewrap"
    assert "bwrap" not in os.environ.get("GYRE_REQUIRE", ""), "GYRE_REQUIRE=bwrap and there is no bwrap"
    return "process"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's architecture and tokenizer, hardly trained."""
    out = tmp_path_factory.mktemp("e2e") / "model"
    argv = [sys.executable, str(QUICKSTART / "make_model.py"), "--out", str(out), "--steps", "2", "--demonstrations", "300", "--threads", "1"]
    subprocess.run(argv, check=True, timeout=DEADLINE_S, capture_output=True)
    return out


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks that want the file done.txt to hold "ok"."""
    out = tmp_path_factory.mktemp("e2e") / "tasks"
    for n in range(3):
        task = out / f"ok-{n}"
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "task.toml").write_text(f'version = "1.0"\n[task]\nname = "ok-{n}"\n[metadata]\nkind = "ok"\n[environment]\nworkdir = "/work"\n')
        (task / "instruction.md").write_text(f"Write ok to done.txt, please ({n}).\n")
        (task / "tests" / "test.sh").write_text('#!/bin/sh\n[ "$(cat done.txt)" = ok ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n')
        (task / "tests" / "test.sh").chmod(0o755)
    return out


class Run:
    """A run directory and its processes."""

    def __init__(self, folder: Path, model: Path, tasks: Path) -> None:
        self.folder, self.dir = folder, folder / "run"
        self.config = folder / "run.toml"
        shutil.copytree(QUICKSTART / "agent", folder / "agent", ignore=shutil.ignore_patterns("__pycache__"))  # `left_behind` knows it by its path
        unsafe = str(backend() == "process").lower()
        self.config.write_text(CONFIG.format(model=model, tasks=tasks, backend=backend(), unsafe=unsafe))
        (folder / "hosts.txt").write_text(HOSTS)
        self.script(RIGHT, WRONG)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def script(self, right: str, wrong: str, delay_s: float = 0.0) -> None:
        """The first two rollouts of a group are right."""
        lines = [{"rollout": r"\.[01]$", "text": right}, {"rollout": r"\.[23]$", "text": wrong}, {"text": "Done."}]
        text = "".join(json.dumps({**line, "token_delay_s": delay_s}) + "\n" for line in lines)
        (self.folder / "script.jsonl").write_text(text)

    def argv(self, command: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", f"gyre_commands.{command}", "--run", str(self.dir), "--config", str(self.config), *flags]

    def start(self, command: str, *flags: str, name: str = "", through: str = "") -> subprocess.Popen[bytes]:
        """Start a process; its output goes to a file named in a failure. `name`: if it is not the only one of its command. `through`: a Python file
        that does something to gyre before it runs the command."""
        name, argv = name or command, self.argv(command, *flags)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([argv[0], through, *argv[2:]] if through else argv, stdout=log, stderr=log)
        return self.processes[name]

    def start_all(self) -> None:
        for command in ("buffer", "train", "rollout", "sandbox"):
            self.start(command)

    def wait(self, command: str, *codes: int) -> None:
        code = self.processes[command].wait(DEADLINE_S)
        assert code in (codes or (0,)), f"{command} ended with {code}:\n{self.log(command)[-4000:]}"

    def log(self, command: str) -> str:
        path = self.folder / f"{command}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def finish(self) -> None:
        """Every process ends by itself but the engine, which serves until told."""
        for command in ("train", "sandbox", "buffer"):
            self.wait(command)
        self.processes["rollout"].send_signal(signal.SIGTERM)
        self.wait("rollout", 143)

    def coord(self, *flags: str) -> subprocess.CompletedProcess[str]:
        argv = self.argv("coord", "--cells", str(self.folder / "hosts.txt"), *flags)
        return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def dump(self, *flags: str) -> list[dict[str, object]]:
        argv = [sys.executable, "-m", "gyre_commands.dump", str(self.dir), *flags]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def report(self) -> dict[str, object]:
        argv = [sys.executable, "-m", "gyre_commands.report", str(self.dir), "--format", "json"]
        return json.loads(subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout)  # type: ignore[no-any-return]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            dead = {c: p.returncode for c, p in self.processes.items() if p.poll() not in (None, 0)}
            assert not dead, f"while waiting for {what}: {dead}\n" + "\n".join(self.log(c)[-3000:] for c in dead)
            assert time.monotonic() < end, f"gave up waiting for {what}"
            time.sleep(0.02)

    def pid_of(self, name: str) -> int | None:
        """The process of this run that was started with this --name."""
        for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(self.dir) in words and "--name" in words and words[words.index("--name") + 1] == name:
                return pid
        return None

    def left_behind(self) -> list[str]:
        """Processes of this run that are still there: its commands, and whatever runs in its sandboxes."""
        found = []
        for pid in (p.name for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                sandboxed = str(self.folder) in Path(f"/proc/{pid}/mountinfo").read_text()  # the harness is mounted from there
            except OSError:
                continue
            if state != "Z" and (str(self.folder) in line or sandboxed):
                found.append(line)
        return found


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, tasks: Path) -> Iterator[Run]:
    made = Run(tmp_path, tiny_model, tasks)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.kill()
            process.wait(30)


def step_groups(run: Run) -> list[str]:
    """Groups of all committed steps, one behind the other."""
    return [g for s in run.dump("--kind", "steps") for g in s["groups"]]  # type: ignore[attr-defined]
