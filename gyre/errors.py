"""Whose fault an error is, in its type; and the exit code that says so.

- `UsageError`: the operator's input. One line with file, key and remedy; exit 2.
- `WorkFailed`: the work did not succeed (a worker died, a deadline passed). Exit 1.
- `Busy`: try later. Exit 75.
- anything else is a bug in gyre: traceback, exit 70.
"""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_BUG, EXIT_BUSY = 0, 1, 2, 70, 75


class GyreError(Exception):
    """Base of the errors that end a command with a single line and `exit_code`."""

    exit_code = EXIT_FAILED


class UsageError(GyreError):
    """Bad input. `where` names the file or flag, `key` the entry in it, `remedy` what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, where: str, problem: str, remedy: str, key: str | None = None) -> None:
        spot = f"{where}: {key}" if key else where
        super().__init__(f"{spot}: {problem}; {remedy}")


class WorkFailed(GyreError):
    """The work failed for a reason that is neither the operator's input nor a bug."""


class DeadlineExceeded(WorkFailed):
    """A wait ended without what it waited for, which the message names."""

    def __init__(self, what: str, waited_s: float) -> None:
        super().__init__(f"gave up after {waited_s:.1f} s waiting for {what}")


class Busy(GyreError):
    """Someone else holds what this command needs; trying again later may work."""

    exit_code = EXIT_BUSY


class Refused(GyreError):
    """A peer refused this process (wire version, stale term, unknown key)."""
