#!/usr/bin/env -S python3 -IS
"""The verifier of every kind but one, copied as `tests/test.sh`. Writes 1 or 0 to /logs/verifier/reward.txt.

Next to it lie `expected.py` (a literal: what must be so in the end) and, where a function is to be run,
`calls.py` (a literal: file, function, arguments). Standard library only, few imports: start-up is most of the
cost.

Code of the agent runs in a child process which cannot open any file, start any process or outlive the
verdict, and in whose memory the right results have never been. All it can do is send results; they are
compared here, as text, after its death. So leaving early, patching builtins, an object that equals everything
or a forged reward come to 0.
"""

# ruff: noqa: PTH110, PTH118, PTH123, SIM105
import os
import sys

WORK = os.environ.get("GYRE_WORK", "/work")
TESTS = os.environ.get("GYRE_TESTS", "/tests")
LOGS = os.environ.get("GYRE_LOGS", "/logs/verifier")
LIMIT_BYTES = 65536
LIMIT_S = 2.0
SIGKILL = 9  # `signal` would import `enum`


def read(path):
    """A regular file of the workspace as text; None if it is missing, a link, anything else, or too large."""
    try:
        fd = os.open(os.path.join(WORK, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        mode = os.fstat(fd).st_mode
        data = os.read(fd, LIMIT_BYTES + 1) if mode & 0o170000 == 0o100000 else None
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if data is None or len(data) > LIMIT_BYTES else data.decode("utf-8", "replace")


def literal(name):
    """Our own file beside this one: a Python literal (json would take longer to import than all the rest)."""
    with open(os.path.join(TESTS, name), encoding="utf-8") as f:
        return eval(f.read(), {"__builtins__": {}})  # never anything that an agent wrote


def run_agent_code(source, function, inputs, out):
    """In the child: give up all rights, run the agent's source, send the repr of each result as a line."""
    import resource

    if "import" in source:  # honest code may want these; after the next lines nothing can be loaded any more
        for name in ("functools", "itertools", "math", "operator", "typing"):
            __import__(name)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    scope = {"__name__": "solution"}
    exec(compile(source, "solution", "exec"), scope)
    for given in inputs:
        os.write(out, (repr(scope[function](*given)) + "\n").encode())


def results(path, function, inputs):
    """What the agent's function returned for each input, as text; whatever it sent if it broke off."""
    import select
    import time

    source = read(path)
    if source is None:
        return []
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(back)
            run_agent_code(source, function, inputs, out)
        finally:  # also for SystemExit; atexit handlers of the agent do not run
            os._exit(0)
    os.close(out)
    data, deadline = b"", time.monotonic() + LIMIT_S
    while len(data) <= LIMIT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([back], [], [], left)[0]:
            break
        piece = os.read(back, 4096)
        if not piece:
            break
        data += piece
    for kill in (os.kill, os.killpg):  # the group too, where the limit on processes does not hold
        try:
            kill(child, SIGKILL)
        except OSError:
            pass
    os.waitpid(child, 0)
    return data.decode("utf-8", "replace").splitlines()


def verdict():
    got = None
    if os.path.exists(os.path.join(TESTS, "calls.py")):
        got = results(**literal("calls.py"))
    expected = literal("expected.py")  # only now: the child never had it
    if got != expected["outputs"]:
        return 0
    for path, want in expected["files"].items():
        if want is None:
            if os.path.lexists(os.path.join(WORK, path)):
                return 0
        else:
            text = read(path)
            if text is None or text.rstrip("\n") != want:
                return 0
    return 1


if __name__ == "__main__":
    reward = verdict()
    with open(os.path.join(LOGS, "reward.txt"), "w") as f:
        f.write(f"{reward}\n")
    sys.exit(0)
