"""From a task set to the stream of queries: seeded, endless or of so many epochs.

Invariants
- Query number i of a run is a pure function of (tasks, seed, i): each epoch is a permutation of all tasks, drawn from (seed, epoch).
- The same task in two epochs is two queries, hence two groups.
- Every seed derives from `run.seed` and what it is for; a ticket issued again keeps its seed.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import msgspec

from gyre import inputs
from gyre.errors import UsageError


class Task(msgspec.Struct, frozen=True):
    """A Harbor task directory. `kind` is `[metadata] kind` of its task.toml, "" if there is none."""

    path: str
    kind: str = ""


class TaskSet(msgspec.Struct, frozen=True):
    """What a run trains and evaluates on."""

    train: tuple[Task, ...]
    heldout: tuple[Task, ...] = ()


def derive_seed(*parts: object) -> int:
    """63 bits of blake2b over the parts."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class QueryStream:
    """The queries of a run by number. `epochs` 0 has no end."""

    def __init__(self, tasks: tuple[Task, ...], seed: int, epochs: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self.total: int | None = len(tasks) * epochs if epochs else None
        self._order: tuple[int, list[int]] = (-1, [])

    def left(self, drawn: int) -> int | None:
        """Queries after the first `drawn`; None without end."""
        return None if self.total is None else max(0, self.total - drawn)

    def query(self, number: int) -> tuple[Task, int]:
        """The task of query `number` and its epoch."""
        epoch, position = divmod(number, len(self._tasks))
        if self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._tasks[self._order[1][position]], epoch


def load_tasks(place: str, key: str) -> tuple[Task, ...]:
    """The tasks of a set (`inputs.task_dirs`). Raises `UsageError` naming `key`."""
    if not place:
        raise UsageError("run.toml", "not set", f"set {key} to a directory of Harbor tasks, or a list of them", key)
    return tuple(_load(d) for d in inputs.task_dirs(Path(place), key))


def _load(directory: Path) -> Task:
    file = directory / "task.toml"
    for needed in ("instruction.md", "tests/test.sh"):
        if not (directory / needed).is_file():
            raise UsageError(str(directory), f"has no {needed}", "add it, or take the directory out of the task set")
    metadata = inputs.toml(file, "mend it, or take the task out of the task set").get("metadata")
    kind = metadata.get("kind", "") if isinstance(metadata, dict) else ""
    return Task(str(directory), str(kind))


def load_task_set(train: str, heldout: str, eval_tasks: int) -> TaskSet:
    """Training tasks and `eval_tasks` of the held-out ones (0: all), evenly spaced over their names, so that each kind has its share."""
    held = load_tasks(heldout, "tasks.heldout") if heldout else ()
    n = min(eval_tasks, len(held)) or len(held)
    return TaskSet(load_tasks(train, "tasks.train"), tuple(held[i * len(held) // n] for i in range(n)))
