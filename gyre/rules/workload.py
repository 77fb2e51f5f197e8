"""Workload files: a system, and the executions that it faces. Read by `gyre-sim` and by what plays them compressed.

    [system]              sizes, costs of moves; the keys that run.toml's [system] shares have the same meaning
    [workload]            model = "slots" | "shared", cost of training, bursts, seeds
    [workload.execution_h]  slots: an execution holds a slot for its whole duration, lognormal, correlated within a query
    [workload.shared]       shared: turns of a decode and a tool phase; decoding advances at 1 / (t0_s + t1_s·active/cells) tokens per second
    [workload.faults]       optional: cells that die and come back

Invariants: every draw derives from (seed, query, index) alone, so all rules face the same executions; an unknown key or a bad value is a
`UsageError`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gyre import inputs
from gyre.errors import UsageError

Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class System(_Table, frozen=True, kw_only=True):
    """Cells, batches and what it costs to turn. `target_staleness` in optimizer steps, several to compare."""

    cells: Annotated[int, Meta(ge=2, le=4096)]
    groups_per_step: Count
    rollouts_per_group: Count
    steps_per_burst: Count
    target_staleness: NotNegative | Annotated[list[NotNegative], Meta(min_length=1)]
    dispatch: Literal["boundary", "continuous"] = "boundary"
    slots_per_cell: Count
    to_train_s: NotNegative
    to_rollout_s: NotNegative
    update_s: NotNegative
    publish_s: NotNegative

    @property
    def targets(self) -> list[float]:
        return self.target_staleness if isinstance(self.target_staleness, list) else [self.target_staleness]


class Lognormal(_Table, frozen=True, kw_only=True):
    """exp(ln median + sigma·z)."""

    median: Positive
    sigma: Annotated[float, Meta(ge=0, le=10)]

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, random: Random) -> float:
        return self.median * math.exp(self.sigma * random.gauss(0, 1))


class ExecutionHours(Lognormal, frozen=True, kw_only=True):
    """Durations of executions in hours; z = sqrt(correlation)·z_query + sqrt(1 - correlation)·z_execution."""

    correlation: Annotated[float, Meta(ge=0, le=1)] = 0.0
    harness_timeout_h: Positive


class Shared(_Table, frozen=True, kw_only=True):
    """Turns; decode phases share the rollout cells."""

    t0_s: NotNegative
    t1_s: NotNegative
    turns: Lognormal
    tokens_per_turn: Lognormal
    tool_s: Lognormal
    harness_timeout_h: Positive


class Faults(_Table, frozen=True, kw_only=True):
    """A cell dies after an exponential time of that mean, and says hello again `repair_s` later."""

    cell_mtbf_h: Positive
    repair_s: NotNegative = 600.0


@lru_cache(maxsize=4096)
def _query_z(seed: int, query: int) -> float:
    return Random(f"{seed}/{query}").gauss(0, 1)


class Executions(_Table, frozen=True, kw_only=True):
    """[workload]. `replayed_s` (from a run, never in a file): durations by group, drawn from with replacement."""

    model: Literal["slots", "shared"]
    train_cell_h_per_group: Positive
    bursts: Count
    seeds: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    execution_h: ExecutionHours | None = None
    shared: Shared | None = None
    faults: Faults | None = None
    replayed_s: tuple[tuple[float, ...], ...] = ()

    def duration_s(self, seed: int, query: int, index: int) -> float:
        """Seconds of an execution that holds a slot, time-out applied."""
        if self.replayed_s:
            group = Random(f"{seed}/{query}").choice(self.replayed_s)
            return group[index] if index < len(group) else Random(f"{seed}/{query}/{index}").choice(group)
        e = self.execution_h
        assert e is not None
        z = math.sqrt(e.correlation) * _query_z(seed, query)
        z += math.sqrt(1 - e.correlation) * Random(f"{seed}/{query}/{index}").gauss(0, 1)
        return 3600 * min(e.median * math.exp(e.sigma * z), e.harness_timeout_h)

    def turns(self, seed: int, query: int, index: int) -> Iterator[tuple[float, float]]:
        """(tokens, seconds of the tool) of each turn of an execution that shares; the last turn's tool is not run."""
        s = self.shared
        assert s is not None
        random = Random(f"{seed}/{query}/{index}")
        for _ in range(max(1, round(s.turns.draw(random)))):
            yield s.tokens_per_turn.draw(random), s.tool_s.draw(random)


class Workload(_Table, frozen=True, kw_only=True):
    """A workload file."""

    system: System
    workload: Executions


def apply_sets(data: dict[str, Any], sets: Sequence[str]) -> None:
    """Put `--set` values into nested tables, in place; a new value loses to none."""
    for item in sets:
        dotted, value = inputs.assignment(item, "system.cells=16")
        path, table = dotted.split("."), data
        for name in path[:-1]:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise UsageError("--set", f"{name} is no table", "give the dotted key of a value", ".".join(path))
            table = inner
        table[path[-1]] = value


def _keys(type_: Any, prefix: str = "") -> Iterator[str]:
    for f in msgspec.structs.fields(type_):
        inner = [t for t in (f.type, *getattr(f.type, "__args__", ())) if isinstance(t, type) and issubclass(t, msgspec.Struct)]
        yield prefix + f.encode_name
        for t in inner:
            yield from _keys(t, f"{prefix}{f.encode_name}.")


def build(where: str, data: dict[str, Any]) -> Workload:
    """A workload from nested tables. Raises `UsageError` naming `where` and the key."""
    try:
        made = msgspec.convert(data, Workload)
    except msgspec.ValidationError as e:
        raise UsageError(where, *_explained(str(e))) from None
    w = made.workload
    if w.replayed_s and where != "replay":
        raise UsageError(where, "unknown key", "durations of a run are taken with --replay", "workload.replayed_s")
    table = "execution_h" if w.model == "slots" else "shared"
    if getattr(w, table) is None and not w.replayed_s:
        raise UsageError(where, f'missing, and model = "{w.model}" needs it', f"write [workload.{table}]", f"workload.{table}")
    if w.shared is not None and not w.shared.t0_s + w.shared.t1_s:
        raise UsageError(where, "decoding takes no time", "give t0_s or t1_s", "workload.shared.t0_s")
    if len(set(made.system.targets)) < len(made.system.targets):
        raise UsageError(where, "a target stands there twice", "name each once", "system.target_staleness")
    return made


def _explained(message: str) -> tuple[str, str, str]:
    """msgspec's message as (problem, remedy, key)."""
    text, _, at = message.partition(" - at `$")
    path = re.sub(r"\[\.\.\.\]|\[\d+\]", "", at.rstrip("`")).lstrip(".")
    field = re.search(r"(?:unknown|required) field `(.*)`", text)
    if field is None:
        return text.lower().replace("`", ""), "docs/commands/gyre-sim.md says what each key takes", path
    key = f"{path}.{field[1]}".lstrip(".")
    if "required" in text:
        return "missing", "write it; examples/workloads has complete files", key
    close = difflib.get_close_matches(key, {k for k in _keys(Workload) if k.count(".") == key.count(".")}, n=1)
    return "unknown key", f"did you mean {close[0]}?" if close else "docs/commands/gyre-sim.md lists the keys", key


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file's content. Raises `UsageError`."""
    return inputs.toml(file, "give a workload file; examples/workloads has some")


def load(file: Path, sets: Sequence[str] = ()) -> Workload:
    """Read a workload file, with `--set` values over it. Raises `UsageError`."""
    data = read_toml(file)
    apply_sets(data, sets)
    return build(str(file), data)
