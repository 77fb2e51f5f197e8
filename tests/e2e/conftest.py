"""Fixtures of the whole runs."""

from __future__ import annotations

from whole_run import run, tasks, tiny_model

__all__ = ["run", "tasks", "tiny_model"]
