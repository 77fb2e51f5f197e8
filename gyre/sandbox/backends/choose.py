"""Backends by name."""

from __future__ import annotations

from gyre.sandbox.backends.base import Backend
from gyre.sandbox.backends.bubblewrap import Bubblewrap
from gyre.sandbox.backends.process import Process


def choose(name: str, *, unsafe: bool) -> Backend:
    """A backend that is not started yet. `UsageError` if it may not be used."""
    return Process(unsafe=unsafe) if name == "process" else Bubblewrap(unsafe=unsafe)
