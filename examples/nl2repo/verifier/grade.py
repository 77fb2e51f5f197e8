"""Grades the package that an agent wrote: reward = the fraction of upstream's tests (expected.json) that it passes.

Copied into each task's `tests/`. Standard library only. The agent's code runs in a child process (lib/run.py), together with pytest, and may do there
what it likes; so this process loads nothing that an agent wrote, and

- a child's word counts only if it came to its end and the canaries, tests that nothing can pass, failed in it. A child that dies or hangs is started
  again without the test that it was at, and when time runs short with those tests alone that passed in one that died;
- what the child says bears a token that it was given on its standard input;
- the reward is written after the death of every process that was started here, into a directory emptied before.

Without a list of tests (while a task is made) it prints the names of those that passed, in each of so many runs.
"""

import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORK = os.environ.get("GYRE_WORK", "/work")
TESTS = Path(os.environ.get("GYRE_TESTS", "/tests"))
LOGS = Path(os.environ.get("GYRE_LOGS", "/logs/verifier"))
CANARIES = 6
START_S = 60.0  # until the first test starts
TEST_S = 10.0  # no test may take longer
SEARCH_S = 140.0  # for children that die or hang
TOTAL_S = 240.0  # below verifier.timeout_sec of task.toml
LOSSES = 20  # children that may die or hang
MOST_UNREAD = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


class Run:
    """What one child came to."""

    def __init__(self):
        self.passed, self.failed = set(), set()
        self.at = None  # the test that it is in
        self.said_end = False

    def hear(self, word, test):
        if word == "start":
            self.at = test
        elif word == "end":
            self.said_end = True
        else:
            (self.passed if word == "passed" else self.failed).add(test)
            self.at = None

    @property
    def forged(self):
        return any(is_canary(test) for test in self.passed)

    @property
    def complete(self):
        return self.said_end and self.at is None and sum(map(is_canary, self.failed)) == CANARIES


def is_canary(test):
    return test.startswith("canary/")


def run_once(targets, skip, keep, deadline):
    """Start a child, hear it until it is done, silent for too long, or dead, and kill all that it left."""
    token = secrets.token_hex(16)
    back, out = os.pipe()
    scratch = tempfile.mkdtemp()
    order = {"out": out, "targets": targets, "skip": sorted(skip), "keep": sorted(keep), "work": WORK}
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"}
    env |= {"PYTHONHASHSEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    argv = [sys.executable, "-s", "-S", "-B", str(TESTS / "lib" / "run.py"), json.dumps(order)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[out], cwd=scratch, env=env, start_new_session=True)
    os.close(out)
    child.stdin.write(token.encode())
    child.stdin.close()
    run = hear(back, token.encode(), deadline)
    os.close(back)
    kill_all()
    shutil.rmtree(scratch, ignore_errors=True)
    return run


def hear(back, token, deadline):
    run, unread = Run(), b""
    silent = time.monotonic() + START_S
    while not run.said_end and (left := min(silent, deadline) - time.monotonic()) > 0:
        if not select.select([back], [], [], left)[0]:
            break
        data = os.read(back, 65536)
        if not data or len(unread) > MOST_UNREAD:
            break
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            said, _, rest = line.partition(b" ")
            if secrets.compare_digest(said, token):
                run.hear(*json.loads(rest))
                silent = time.monotonic() + TEST_S
    return run


def kill_all():
    """Kill every process that was started from here; orphans are children of this process."""
    while True:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def passing(targets):
    """The tests that pass; none if the child lied."""
    skip, seen, started = set(), set(), time.monotonic()
    for _ in range(LOSSES):
        run = run_once(targets, skip, (), started + SEARCH_S)
        if run.forged or run.complete:
            return counted(run)
        seen |= run.passed
        if run.at is None or is_canary(run.at) or time.monotonic() > started + SEARCH_S:
            break
        print("lost in", run.at)
        skip.add(run.at)
    return counted(run_once(targets, skip, seen, started + TOTAL_S)) if seen else set()


def counted(run):
    """The tests of a run, if its word counts."""
    if run.forged:
        print("a test passed that nothing can pass: the package changes how it is tested")
    elif not run.complete:
        print("the tests did not come to their end")
    return {test for test in run.passed if not is_canary(test)} if run.complete and not run.forged else set()


def write_reward(values):
    for left in LOGS.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    with (LOGS / "reward.json").open("x") as file:
        json.dump(values, file)


def main():
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit("orphans cannot be adopted: a package's leftovers could not be killed")
    wanted = json.loads((TESTS / "expected.json").read_text())
    passed, *more = [passing(wanted["targets"]) for _ in range(wanted.get("runs", 1))]
    if wanted["tests"] is None:
        print("\nPASSED", json.dumps([sorted(run) for run in (passed, *more)]))
        wanted["tests"] = sorted(passed) or ["any"]
    n = len(passed.intersection(wanted["tests"]))
    write_reward({"reward": n / len(wanted["tests"]), "passed": n, "tests": len(wanted["tests"])})


if __name__ == "__main__":
    main()
