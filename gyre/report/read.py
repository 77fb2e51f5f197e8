"""Read a run directory, live or finished, without ever writing to it.

Invariants
- The ledger is opened read-only (SQLite URI `mode=ro`), payloads by position; a run under way can be read, and what is seen was committed.
- Records are plain dicts of JSON types with a stable order of keys; NaN becomes null. `trajectories` yields "gyre.trajectory/1" as docs name it.
- Nothing is held in memory beyond one group's rows and one execution's payload.
- With `redact_system`, no record holds a token or a word of a system message.

Not here: formats and output (gyre-dump), figures (gyre-report).
"""

from __future__ import annotations

import datetime
import logging
import math
import sqlite3
import tomllib
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre.errors import UsageError
from gyre.events import Event, EventReader
from gyre.report import conversation
from gyre.rules import staleness
from gyre.trajectory.flatten import flatten
from gyre.trajectory.flatten import offsets as starts_of
from gyre.types import Purpose, RolloutState, TrajectoryMeta
from gyre.wire import payload
from gyre.wire.codec import Arrays
from gyre.wire.messages import RolloutEnded
from gyre.wire.rows import Codec, EvalRow, GroupRow, GroupState, MetaRow, PublicationRow, QueryRow, RolloutRow, StepRow, evaluated
from gyre.wire.segments import Place, SegmentReader

TRAJECTORY_SCHEMA: Final = "gyre.trajectory/1"

Record = dict[str, Any]


def timestamp(seconds: float | None) -> str | None:
    """RFC 3339, UTC, with milliseconds."""
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(v) else v for v in values]


class Selection(msgspec.Struct, frozen=True):
    """What to read: consuming steps first..last (inclusive; None: all, also unconsumed), one group, one rollout,
    evaluation rollouts too (which no step consumes)."""

    first_step: int | None = None
    last_step: int | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    evaluation: bool = False


ALL: Final = Selection()


class RunReader:
    """A run directory, read-only. Raises `UsageError` when there is no ledger in it. A context manager."""

    def __init__(self, run_dir: Path, *, redact_system: bool = False) -> None:
        self.run_dir, self._redact = run_dir, redact_system
        self._told = False  # that there are executions whose tokens were not kept
        path = run_dir / "ledger.db"
        if not path.is_file():
            raise UsageError(str(run_dir), "holds no ledger.db", "give the directory of a run")
        self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        self._payloads = SegmentReader(run_dir / "payload")
        self._query, self._group, self._rollout = Codec(QueryRow), Codec(GroupRow), Codec(RolloutRow)
        self._step, self._publication, self._eval = Codec(StepRow), Codec(PublicationRow), Codec(EvalRow)
        try:
            self.meta: MetaRow = next(iter(Codec(MetaRow).select(self._db)), MetaRow())
        except sqlite3.Error as e:
            raise UsageError(str(path), f"cannot be read as a ledger ({e})", "give the directory of a run") from None

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._payloads.close()
        self._db.close()

    # --- rows ---

    def query_rows(self) -> Iterator[QueryRow]:
        return self._query.select(self._db)

    def group_rows(self, selection: Selection = ALL) -> Iterator[GroupRow]:
        """Groups in the order of admission."""
        conditions, parameters = _where(selection, group=True)
        return self._group.select(self._db, conditions, parameters)

    def rollout_rows(self, group_id: str) -> list[RolloutRow]:
        """Executions of a group (or of an evaluation) by position."""
        return list(self._rollout.select(self._db, "WHERE group_id = ? ORDER BY position", (group_id,)))

    def step_rows(self) -> Iterator[StepRow]:
        """Committed steps of the surviving lineage, in order."""
        return self._step.select(self._db, "WHERE state = 'committed' ORDER BY step")

    def publication_rows(self) -> Iterator[PublicationRow]:
        return self._publication.select(self._db)

    def eval_rows(self) -> Iterator[EvalRow]:
        return self._eval.select(self._db, "WHERE void = 0 ORDER BY step")

    def graph(self, row: RolloutRow) -> tuple[RolloutEnded, Arrays] | None:
        """An execution's prefix graph with its arrays; None if it sent none, or it was not kept. Raises `WorkFailed` when the payload is damaged."""
        if row.segment is None:
            if row.length and not self._told:
                self._told = True
                logging.getLogger(__name__).warning('executions without tokens are left out: run.keep_payloads is "needed", theirs were removed')
            return None
        message, arrays = payload.parse(self._payloads.read(Place(row.segment, row.offset, row.length)))
        return message, conversation.without_system(self.conversations, message.nodes, arrays) if self._redact else arrays

    @cached_property
    def conversations(self) -> conversation.Conversations:
        """Reads text from tokens. Raises `UsageError` when the model's tokenizer is not where the run's configuration says."""
        file = self.run_dir / "run.toml"
        try:
            model = tomllib.loads(file.read_text(encoding="utf-8")).get("model", {}).get("path", "")
        except (OSError, ValueError) as e:
            raise UsageError(str(file), f"cannot be read ({e})", "it says where the model is, whose tokenizer is needed for text") from None
        return conversation.Conversations(self.run_dir / model)

    # --- records ---

    def queries(self) -> Iterator[Record]:
        for q in self.query_rows():
            yield {
                "schema": "gyre.query/1", "run_id": self.meta.run_id, "query_id": q.query_id, "purpose": q.purpose.value, "task": q.task,
                "kind": q.kind, "task_epoch": q.task_epoch, "number": q.number,
            }  # fmt: skip

    def groups(self, selection: Selection = ALL) -> Iterator[Record]:
        for g in self.group_rows(selection):
            yield {
                "schema": "gyre.group/1", "run_id": self.meta.run_id, "query_id": g.query_id, "group_id": g.group_id, "state": g.state.value,
                "step": _step(g), "version_at_dispatch": g.version_step, "version_at_consumption": _consumed_at(g), "staleness": _staleness(g),
                "staleness_interpolated": _interpolated(g), "graded": g.graded, "reward_mean": g.reward_mean, "uniform": g.uniform,
                "reason": g.reason or None, "substitute_for": g.substitute_for or None, "admitted_at": timestamp(g.admitted_at),
                "ready_at": timestamp(g.ready_at), "taken_at": timestamp(g.taken_at),
            }  # fmt: skip

    def rollouts(self, selection: Selection = ALL) -> Iterator[Record]:
        for g, r in self._pairs(selection):
            yield {**self._head(g, r), **_outcome(r), "version_at_dispatch": r.version_step, "version_at_consumption": _consumed_at(g),
                   "staleness": _staleness(g), "harness": r.harness, "harness_exit": r.harness_exit, "cells": r.cells, "n_calls": r.n_calls,
                   "left_tokens": r.left_tokens, "left_leaves": r.left_leaves,
                   "n_tokens": sum(i.n_tokens for i in r.items), "n_trainable": sum(i.n_trainable for i in r.items), "holder": r.holder,
                   "reissues": r.reissues, "detail": r.detail, "seconds": r.seconds, "version_min": r.version_min, "version_max": r.version_max,
                   "dispatched_at": timestamp(r.dispatched_at), "leased_at": timestamp(r.leased_at),
                   "ended_at": timestamp(r.ended_at)}  # fmt: skip

    def trajectories(self, selection: Selection = ALL, *, tokens: bool = True) -> Iterator[Record]:
        """Trajectories of accepted executions. Without `tokens`, the arrays are left out and no payload is read."""
        for g, r in self._pairs(selection):
            if r.state is RolloutState.DISCARDED or not r.items:
                continue
            if not tokens:
                for item in r.items:
                    yield {
                        **self._trajectory(g, r, item.index, item.leaf_class or None),
                        "n_tokens": item.n_tokens,
                        "n_trainable": item.n_trainable,
                        **_times(r),
                    }
                continue
            read = self.graph(r)
            if read is None:
                continue
            message, arrays = read
            offsets = starts_of(message.nodes)
            for t in message.trajectories:
                yield self._with_tokens(g, r, t, message, arrays, offsets)

    def calls(self, selection: Selection = ALL) -> Iterator[Record]:
        """Model calls with the tokens of their prompts and completions: what gyre-graph draws."""
        for g, r in self._pairs(selection):
            read = self.graph(r)
            if read is None:
                continue
            message, arrays = read
            offsets = starts_of(message.nodes)
            for c in message.calls:
                path, node = [], c.prompt_node
                while node >= 0:
                    path.append(node)
                    node = message.nodes[node].parent
                own: list[int] = []  # its completion, which a branch may have split
                node = c.node
                while node >= 0 and message.nodes[node].call_id == c.call_id:
                    own.insert(0, node)
                    node = message.nodes[node].parent
                spans = {name: [x for n in own for x in arrays[name][offsets[n] : offsets[n + 1]]] for name in arrays}
                ids = arrays["token_ids"]
                yield {
                    **self._head(g, r), "schema": "gyre.call/1", "call_id": c.call_id, "leaf_class": c.leaf_class.value, "status": c.status.value,
                    "finish_reason": c.finish_reason, "cell": c.cell, "started_s": c.started_s, "ended_s": c.ended_s, "n_prompt": c.n_prompt,
                    "n_completion": c.n_completion, "prompt_node": c.prompt_node, "node": c.node, "api": c.api, "asked": c.asked,
                    "prompt_ids": [x for n in reversed(path) for x in ids[offsets[n] : offsets[n + 1]]], "token_ids": spans["token_ids"],
                    "logprobs": finite(spans["logprobs"]), "versions": [v if v >= 0 else None for v in spans["versions"]],
                }  # fmt: skip

    def graphs(self, selection: Selection = ALL, *, tokens: bool = True, most: int | None = None) -> Iterator[Record]:
        """Prefix graphs whole, every token once: what gyre-graph draws. Messages have the words of their first `most` tokens, if the run's tokenizer
        can be had; else there are no messages, and a warning."""
        try:
            c: conversation.Conversations | None = self.conversations
        except (UsageError, ModuleNotFoundError) as e:
            logging.getLogger(__name__).warning("messages are not shown: %s", e)
            c = None
        for g, r in self._pairs(selection):
            read = self.graph(r)
            if read is None:
                continue
            message, arrays = read
            nodes, ids = msgspec.to_builtins(message.nodes), array("i", arrays["token_ids"])
            if c is not None:
                for node, pieces in zip(nodes, conversation.roles(c, message.nodes, ids), strict=True):
                    node["messages"] = [{"role": p.role, "n_tokens": p.end - p.start, "text": c.text(ids, p, most)} for p in pieces]
            record = {
                **self._head(g, r), "schema": "gyre.graph/1", **_outcome(r), "harness": r.harness, "nodes": nodes,
                "calls": [msgspec.structs.asdict(x) for x in message.calls], "trajectories": msgspec.to_builtins(message.trajectories),
            }  # fmt: skip
            if tokens:
                record |= {"token_ids": ids.tolist(), "logprobs": finite(arrays["logprobs"]),
                           "versions": [v if v >= 0 else None for v in arrays["versions"]]}  # fmt: skip
            yield record

    def steps(self, selection: Selection = ALL) -> Iterator[Record]:
        """Committed steps with their statistics and the core's metrics."""
        for s in self.step_rows():
            if (selection.first_step or 0) <= s.step and (selection.last_step is None or s.step <= selection.last_step):
                yield {
                    "schema": "gyre.step/1", "run_id": self.meta.run_id, "step": s.step, "term": s.term, "hash": s.hash, "groups": s.groups,
                    "micro_steps": s.micro_steps, "stats": s.manifest.get("stats", {}), "metrics": s.metrics, "opened_at": timestamp(s.opened_at),
                    "sealed_at": timestamp(s.sealed_at), "committed_at": timestamp(s.committed_at),
                }  # fmt: skip

    def evals(self) -> Iterator[Record]:
        """Complete evaluations: the fields of the `eval` event, as computed from the ledger."""
        kinds = {q.query_id: q.kind for q in self.query_rows() if q.purpose is Purpose.EVAL}
        for e in self.eval_rows():
            if e.completed_at is None:
                continue
            yield {
                "schema": "gyre.eval/1", "run_id": self.meta.run_id, "eval_id": e.eval_id, "version": e.step, "term": e.term, "n": e.n,
                **evaluated(self.rollout_rows(e.eval_id), kinds),
                "issued_at": timestamp(e.issued_at), "completed_at": timestamp(e.completed_at),
            }  # fmt: skip

    def events(self) -> Iterator[Event]:
        """The event log, without a torn tail."""
        return EventReader(self.run_dir / "events.jsonl").events()

    def counts(self) -> dict[str, int]:
        """Executions by state, and those admitted; evaluation aside."""
        sql = "SELECT state, count(*) FROM rollouts WHERE purpose = 'train' GROUP BY state"
        found: dict[str, int] = dict(self._db.execute(sql).fetchall())
        return {"admitted": sum(found.values()), **{s.value: found.get(s.value, 0) for s in RolloutState}}

    def group_counts(self) -> dict[str, int]:
        """Groups by state."""
        return dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())

    # --- parts ---

    def _pairs(self, selection: Selection) -> Iterator[tuple[GroupRow | None, RolloutRow]]:
        if selection.rollout_id is not None:
            for r in self._rollout.select(self._db, "WHERE rollout_id = ?", (selection.rollout_id,)):
                yield next(self._group.select(self._db, "WHERE group_id = ?", (r.group_id,)), None), r
            return
        for g in self.group_rows(selection):
            for r in self.rollout_rows(g.group_id):
                yield g, r
        if selection.evaluation and (selection.group_id, selection.first_step, selection.last_step) == (None, None, None):
            for e in self.eval_rows():
                for r in self.rollout_rows(e.eval_id):
                    yield None, r

    def _head(self, g: GroupRow | None, r: RolloutRow) -> Record:
        return {
            "schema": "gyre.rollout/1", "run_id": self.meta.run_id, "query_id": r.query_id, "group_id": r.group_id, "rollout_id": r.rollout_id,
            "purpose": r.purpose.value, "position": r.position, "task": r.task, "state": r.state.value, "step": _step(g), "epoch": r.epoch,
        }  # fmt: skip

    def _trajectory(self, g: GroupRow | None, r: RolloutRow, index: int, leaf_class: str | None = None) -> Record:
        return {
            "schema": TRAJECTORY_SCHEMA, "run_id": self.meta.run_id, "query_id": r.query_id, "group_id": r.group_id, "rollout_id": r.rollout_id,
            "trajectory_id": f"{r.rollout_id}.{index}", "step": _step(g), "epoch": r.epoch, "index": index, "n_trajectories": len(r.items),
            "leaf_class": leaf_class, **_outcome(r), "version_at_dispatch": r.version_step, "version_at_consumption": _consumed_at(g),
            "staleness": _staleness(g), "harness": r.harness, "cells": r.cells,
        }  # fmt: skip

    def _with_tokens(self, g: GroupRow | None, r: RolloutRow, t: TrajectoryMeta, message: RolloutEnded, arrays: Arrays, offsets: list[int]) -> Record:
        flat = flatten(message.nodes, t, arrays, offsets)
        return {
            **self._trajectory(g, r, t.index, t.leaf_class.value), "token_ids": flat.token_ids.tolist(), "loss_mask": flat.loss_mask.tolist(),
            "logprobs": finite(flat.logprobs), "versions": [v if v >= 0 else None for v in flat.versions],
            "calls": [{"call_id": call_id, "start": start, "end": end} for call_id, start, end in flat.calls],
            "n_tokens": t.n_tokens, "n_trainable": t.n_trainable, **_times(r),
        }  # fmt: skip


def _where(selection: Selection, *, group: bool) -> tuple[str, tuple[Any, ...]]:
    conditions: list[str] = []
    parameters: list[Any] = []
    if selection.group_id is not None:
        conditions.append("group_id = ?")
        parameters.append(selection.group_id)
    if selection.first_step is not None or selection.last_step is not None:
        conditions.append("state = 'consumed'")
    for bound, operator in ((selection.first_step, ">="), (selection.last_step, "<=")):
        if bound is not None:
            conditions.append(f"step {operator} ?")
            parameters.append(bound)
    return ("WHERE " + " AND ".join(conditions) if conditions else ""), tuple(parameters)


def _step(g: GroupRow | None) -> int | None:
    return g.step if g is not None and g.state is GroupState.CONSUMED else None


def _consumed_at(g: GroupRow | None) -> int | None:
    step = _step(g)
    return None if step is None else step - 1


def _staleness(g: GroupRow | None) -> int | None:
    at = _consumed_at(g)
    return None if g is None or at is None else staleness.discrete(at, g.version_step)


def _interpolated(g: GroupRow) -> float | None:
    at = _consumed_at(g)
    if at is None or g.fraction is None or g.version_next is None:
        return None
    return staleness.interpolated(at, g.version_step, g.version_next, g.fraction)


def _outcome(r: RolloutRow) -> Record:
    return {"ending": r.ending.value if r.ending else None, "reward": r.reward, "advantage": r.advantage, "rewards": r.rewards}


def _times(r: RolloutRow) -> Record:
    return {"dispatched_at": timestamp(r.dispatched_at), "ended_at": timestamp(r.ended_at)}
