"""The rows of the ledger and their SQL, shared by gyre-buffer (which alone writes) and by read-only readers.

Invariants
- A row class is its table: one column per field, in order. Scalars are SQL scalars, everything else is JSON text; NaN never enters.
- Fields are only ever added, with defaults, and readers take a missing column's default: an old ledger stays readable.
- Times `*_at` are seconds since the epoch (UTC).
"""

from __future__ import annotations

import math
import sqlite3
import types
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from gyre.types import Ending, MicroStepState, Purpose, RolloutState

LEDGER_SCHEMA: Final = 1


class GroupState(StrEnum):
    """Where a group is: its rollouts out, complete, taken by the open step, in a committed step, or out of the run."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    CONSUMED = "consumed"
    DISCARDED = "discarded"


class StepState(StrEnum):
    """Of an optimizer step in the ledger; `void` steps belong to a lineage that a restart of the core left."""

    OPEN = "open"
    SEALED = "sealed"
    COMMITTED = "committed"
    VOID = "void"


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory to pack: where it is from and how large it is."""

    rollout_id: str
    index: int
    n_tokens: int
    n_trainable: int
    leaf_class: str = ""
    n_own: int = -1  # tokens that no trajectory before it in its execution has; -1: all


class Row(msgspec.Struct):
    """Base of the rows. `KEY` are the columns of the primary key."""

    TABLE: ClassVar[str] = ""
    KEY: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Values of the primary key."""
        return tuple(getattr(self, k) for k in self.KEY)


class MetaRow(Row):
    """The one row about the run."""

    TABLE: ClassVar[str] = "meta"
    KEY: ClassVar[tuple[str, ...]] = ("id",)

    id: int = 0
    schema: int = LEDGER_SCHEMA
    run_id: str = ""
    seed: int = 0
    term: int = 0
    core: str = ""
    committed: int = 0
    total_steps: int = 0
    published_term: int | None = None
    published_step: int | None = None
    published_at: float = 0.0
    publications: int = 0
    queries_drawn: int = 0
    ready_seq: int = 0
    substitutes_in_a_row: int = 0
    checkpoint_step: int | None = None
    checkpoint_path: str = ""
    checkpoints: list[int] = []  # steps of those that the core keeps
    pruned: int = 0  # payloads of what was consumed up to this step may be gone
    voided: list[str] = []
    discards: dict[str, int] = {}  # groups discarded since the last commit, by reason
    uniform_in_a_row: int = 0  # groups dropped for equal rewards since one was ready, or a step closed

    @property
    def settled(self) -> int:
        """The last step that is in a checkpoint and whose staleness was told: no core goes back behind it unless checkpoints are lost."""
        return min(self.checkpoint_step or 0, self.published_step or 0)


class QueryRow(Row):
    """One query. Held-out tasks are queries of purpose eval, one each."""

    TABLE: ClassVar[str] = "queries"
    KEY: ClassVar[tuple[str, ...]] = ("query_id",)

    query_id: str
    purpose: Purpose
    task: str
    kind: str
    task_epoch: int
    number: int


class GroupRow(Row):
    """The N rollouts of one query."""

    TABLE: ClassVar[str] = "groups"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: str
    query_id: str
    version_term: int  # the policy at dispatch
    version_step: int
    publication: int  # its number, counted from 0
    admitted_at: float
    state: GroupState = GroupState.OPEN
    ready_seq: int | None = None
    ready_at: float | None = None
    step: int | None = None  # that took it
    taken_at: float | None = None
    fraction: float | None = None  # of the interval to the next publication, known at that
    version_next: int | None = None
    reward_mean: float | None = None
    uniform: bool = False
    graded: int = 0
    reason: str = ""  # why it was discarded
    substitute_for: str = ""


class RolloutRow(Row):
    """One execution. Its prefix graph is in the payload at (segment, offset, length), if it sent one."""

    TABLE: ClassVar[str] = "rollouts"
    KEY: ClassVar[tuple[str, ...]] = ("rollout_id",)

    rollout_id: str
    group_id: str
    query_id: str
    purpose: Purpose
    position: int  # in its group
    task: str
    seed: int
    version_term: int
    version_step: int
    ordinal: int  # order of issue
    dispatched_at: float
    state: RolloutState = RolloutState.QUEUED
    epoch: int = 0
    reissues: int = 0
    recorded: int = -1  # highest epoch whose end was recorded
    lease_id: str = ""  # the request that leased it
    holder: str = ""
    leased_at: float | None = None
    ended_at: float | None = None
    ending: Ending | None = None
    reward: float | None = None
    advantage: float | None = None
    rewards: dict[str, float] = {}
    detail: str = ""
    harness: str = ""
    harness_exit: int | None = None
    items: list[Item] = []
    n_calls: int = 0
    left_tokens: int = 0  # trainable, and on no chosen trajectory
    left_leaves: int = 0
    cells: list[str] = []
    seconds: dict[str, float] = {}
    version_min: int | None = None  # of its sampled tokens
    version_max: int | None = None
    segment: int | None = None
    offset: int = 0
    length: int = 0


class EvalRow(Row):
    """One evaluation: every held-out task once at a publication."""

    TABLE: ClassVar[str] = "evals"
    KEY: ClassVar[tuple[str, ...]] = ("eval_id",)

    eval_id: str
    term: int
    step: int
    n: int
    issued_at: float
    outstanding: int
    completed_at: float | None = None
    void: bool = False


def evaluated(rows: Iterable[RolloutRow], kinds: Mapping[str, str]) -> dict[str, Any]:
    """What an evaluation's executions came to, from their rows and the kind of each query; rewards that there are none of are null."""
    graded = [r for r in rows if r.state is not RolloutState.DISCARDED]
    rewards: dict[str, list[float]] = {}
    for r in graded:
        rewards.setdefault(kinds.get(r.query_id, ""), []).append(r.reward or 0.0)
    sampled = [r for r in graded if r.version_min is not None]
    return {
        "graded": len(graded),
        "reward_mean": math.fsum(r.reward or 0.0 for r in graded) / len(graded) if graded else None,
        "by_kind": {k: {"n": len(v), "reward_mean": math.fsum(v) / len(v)} for k, v in sorted(rewards.items()) if k},
        "version_min": min((r.version_min or 0 for r in sampled), default=None),
        "version_max": max((r.version_max or 0 for r in sampled), default=None),
    }


class StepRow(Row):
    """One optimizer step with its manifest."""

    TABLE: ClassVar[str] = "steps"
    KEY: ClassVar[tuple[str, ...]] = ("term", "step")

    term: int
    step: int
    opened_at: float
    state: StepState = StepState.OPEN
    closed: bool = False  # it has all the groups it gets
    groups: list[str] = []
    micro_steps: int = 0
    manifest: dict[str, Any] = {}
    hash: str = ""
    metrics: dict[str, float | None] = {}
    sealed_at: float | None = None
    committed_at: float | None = None


class MicroStepRow(Row):
    """A pack of trajectories of one step."""

    TABLE: ClassVar[str] = "micro_steps"
    KEY: ClassVar[tuple[str, ...]] = ("micro_step_id",)

    micro_step_id: str
    term: int
    step: int
    number: int
    items: list[Item]
    n_tokens: int
    state: MicroStepState = MicroStepState.QUEUED
    claim_id: str = ""  # the request that claimed it
    cell: str = ""
    incarnation: str = ""


class PublicationRow(Row):
    """A version that became the policy."""

    TABLE: ClassVar[str] = "publications"
    KEY: ClassVar[tuple[str, ...]] = ("number",)

    number: int
    term: int
    step: int
    at: float
    cells: list[str] = []
    seconds: float = 0.0


ROWS: Final[tuple[type[Row], ...]] = (MetaRow, QueryRow, GroupRow, RolloutRow, EvalRow, StepRow, MicroStepRow, PublicationRow)

INDICES: Final = (
    "CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id)",
    "CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step)",
    "CREATE INDEX IF NOT EXISTS micro_steps_by_step ON micro_steps (step)",
)

OUTBOX: Final = "CREATE TABLE IF NOT EXISTS outbox (seq INTEGER PRIMARY KEY, line TEXT NOT NULL)"

R = TypeVar("R", bound=Row)


def _scalar(annotation: Any) -> type | None:
    """The SQL scalar behind a field's type, None for what is stored as JSON."""
    if isinstance(annotation, types.UnionType):
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _scalar(kinds[0]) if len(kinds) == 1 else None
    if isinstance(annotation, type):
        for kind in (bool, int, float, str):
            if issubclass(annotation, kind):
                return kind
    return None


class Codec(typing.Generic[R]):
    """A row class's SQL and its conversion from and to SQL values."""

    def __init__(self, row: type[R]) -> None:
        hints = typing.get_type_hints(row)
        self.row = row
        self.columns: tuple[str, ...] = row.__struct_fields__
        kinds = [_scalar(hints[c]) for c in self.columns]
        self._json = [i for i, kind in enumerate(kinds) if kind is None]
        self._is_json = {c: kind is None for c, kind in zip(self.columns, kinds, strict=True)}
        sql: dict[type | None, str] = {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT", None: "TEXT"}
        self.definitions = {c: f'"{c}" {sql[k]}' for c, k in zip(self.columns, kinds, strict=True)}
        body = ", ".join(self.definitions.values())
        self.create = f"CREATE TABLE IF NOT EXISTS {row.TABLE} ({body}, PRIMARY KEY ({', '.join(row.KEY)})) WITHOUT ROWID"
        names = ", ".join(f'"{c}"' for c in self.columns)
        self.put = f"INSERT OR REPLACE INTO {row.TABLE} ({names}) VALUES ({', '.join('?' * len(self.columns))})"
        self.drop = f"DELETE FROM {row.TABLE} WHERE {' AND '.join(f'{k} = ?' for k in row.KEY)}"
        self._encode = msgspec.json.Encoder().encode

    def values(self, row: R) -> list[Any]:
        """SQL values in the order of the columns."""
        values = list(msgspec.structs.astuple(row))
        for i in self._json:
            values[i] = self._encode(values[i]).decode()
        return values

    def decode(self, columns: list[str], values: tuple[Any, ...]) -> R:
        """A row from SQL values; `columns` names them. Unknown columns are ignored, missing ones and NULL take their default."""
        data: dict[str, Any] = {}
        for name, value in zip(columns, values, strict=True):
            if value is not None and (is_json := self._is_json.get(name)) is not None:
                data[name] = msgspec.json.decode(value) if is_json else value
        return msgspec.convert(data, self.row, strict=False)

    def select(self, db: sqlite3.Connection, where: str = "", parameters: tuple[Any, ...] = ()) -> typing.Iterator[R]:
        """Rows, in the order of the key unless `where` says otherwise."""
        order = "" if "ORDER BY" in where else f" ORDER BY {', '.join(self.row.KEY)}"
        cursor = db.execute(f"SELECT * FROM {self.row.TABLE} {where}{order}", parameters)
        columns = [d[0] for d in cursor.description]
        for values in cursor:
            yield self.decode(columns, values)
