"""Backends by name."""

from __future__ import annotations

from gyre.config import Sandbox
from gyre.sandbox.backends.base import Backend
from gyre.sandbox.backends.bubblewrap import Bubblewrap
from gyre.sandbox.backends.process import Process


def choose(name: str, *, unsafe: bool, table: Sandbox | None = None, run: str = "") -> Backend:
    """A backend that is not started yet; `run` is the id of the run whose tasks come later. `UsageError` if it may not be used."""
    if name == "docker":
        from gyre.sandbox.backends.docker import Docker  # its SDK is not loaded for others

        return Docker(table or Sandbox(), run=run, unsafe=unsafe)
    backend: Backend = Process(unsafe=unsafe) if name == "process" else Bubblewrap(unsafe=unsafe)
    if run or (table is not None and table.cpus):
        backend.notes.append(f"{name} does not limit processor time: sandbox.cpus and a task's environment.cpus have no effect")
    return backend
