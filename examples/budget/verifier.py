#!/usr/bin/env -S python3 -IS
"""The verifier of the budget study's tasks, copied as `tests/test.sh`: the reward is the part of the things asked for that were done.

`expected.py` beside it (a literal) has for each thing the files that must be so in the end; None: it must be gone. Files are read as regular files,
never through links; nothing that the agent wrote is run.
"""

# ruff: noqa: PTH118, PTH123
import os

WORK = os.environ.get("GYRE_WORK", "/work")
TESTS = os.environ.get("GYRE_TESTS", "/tests")
LOGS = os.environ.get("GYRE_LOGS", "/logs/verifier")
LIMIT_BYTES = 65536


def read(path):
    """A regular file's text without its final newlines; None if there is none."""
    try:
        fd = os.open(os.path.join(WORK, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        regular = os.fstat(fd).st_mode & 0o170000 == 0o100000
        return os.read(fd, LIMIT_BYTES).decode("utf-8", "replace").rstrip("\n") if regular else None
    finally:
        os.close(fd)


with open(os.path.join(TESTS, "expected.py"), encoding="utf-8") as f:
    expected = eval(f.read(), {"__builtins__": {}})  # our own literal
done = sum(all(read(path) == text for path, text in files.items()) for files in expected)
with open(os.path.join(LOGS, "reward.txt"), "w", encoding="utf-8") as f:
    f.write(f"{done / len(expected)}\n")
