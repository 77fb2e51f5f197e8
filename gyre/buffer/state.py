"""The state of the buffer's machine: the ledger's rows in memory, indices over them, and the few moves that keep them consistent.

Invariants
- A rollout's state changes only in `move`, a group's only in `move_group`: so `counts`, `open`, `ready` and `taken` never drift from the rows.
- In memory are the rows that something can still happen to. Groups that are out of the run, or that a settled step consumed (it is in a checkpoint,
  its staleness was told), leave it with their rollouts (`forget`). They stay in the ledger and in `counts`, and come back (`recall`) before a core
  that starts from an older checkpoint is heard.
- Every changed row is put (`put`), so that a restart from the ledger finds what this memory holds, except leases and polls: leases are armed
  anew at a restart, polls are asked again by their clients.
- No I/O, no clock, no randomness.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from gyre.buffer.effects import Drop, Effect, Log, Now, Put, Received, Reply
from gyre.buffer.queries import QueryStream, TaskSet
from gyre.config import Config
from gyre.errors import UsageError
from gyre.rules import admission
from gyre.types import UNFINISHED, MicroStepState, Purpose, RolloutState, Version
from gyre.wire.messages import ClaimMicroStep, LeaseTickets, Message, Refuse, SealStep, Tickets
from gyre.wire.rows import EvalRow, GroupRow, GroupState, Item, MetaRow, MicroStepRow, PublicationRow, QueryRow, RolloutRow, Row, StepRow, StepState

_REPLIES_KEPT: Final = 4096
_POLLS_KEPT: Final = 65_536  # who asks when there are so many is answered at once

P = TypeVar("P", LeaseTickets, ClaimMicroStep, SealStep)


class Poll(msgspec.Struct):
    """A request that waits for its answer. Sent again, it stays one poll."""

    to: Hashable
    message: LeaseTickets | ClaimMicroStep | SealStep
    holder: str
    since: float
    deadline: float


class State:
    """Rows, indices, and what is in flight. Built from the ledger's rows, or from none; `counts` are of all its executions, if some are left out."""

    def __init__(
        self, config: Config, tasks: TaskSet, rows: Iterable[Row], now: Now, run_id: str = "", counts: Mapping[RolloutState, int] | None = None
    ) -> None:
        self.config = config
        self.system = config.system
        self.tasks = tasks
        self.stream = QueryStream(tasks.train, config.run.seed, config.tasks.epochs)
        s = config.system
        if s.min_group > s.rollouts_per_group:
            raise UsageError(
                "configuration",
                f"{s.min_group} graded executions cannot come from groups of {s.rollouts_per_group}",
                "make it at most system.rollouts_per_group",
                "system.min_group",
            )
        self.quota = admission.quota(s.dispatch, s.target_staleness, s.groups_per_step, s.steps_per_burst)
        if config.run.deterministic and (s.dispatch, s.steps_per_burst, self.quota.groups) != ("boundary", 1, s.groups_per_step):
            remedy = 'with system.dispatch = "boundary", system.steps_per_burst = 1 and system.target_staleness = 0 it does'
            raise UsageError("configuration", "what is sampled depends on when policies are published", remedy, "run.deterministic")
        self.meta = MetaRow(run_id=run_id, seed=config.run.seed)
        self.queries: dict[str, QueryRow] = {}  # held-out ones
        self.groups: dict[str, GroupRow] = {}
        self.rollouts: dict[str, RolloutRow] = {}
        self.members: dict[str, list[RolloutRow]] = {}
        self.evals: dict[str, EvalRow] = {}
        self.steps: dict[int, StepRow] = {}  # of the surviving lineage
        self.micro_steps: dict[str, MicroStepRow] = {}  # of the open step
        self.publication: PublicationRow | None = None  # the last
        # indices
        self.counts = dict.fromkeys(RolloutState, 0)
        self.admitted = 0  # executions, evaluation aside: the counts add up to it
        self.open: dict[str, None] = {}  # groups whose rollouts are out, in the order of admission
        self.ready: list[tuple[int, str]] = []  # (ready_seq, group_id), sorted
        self.taken: list[str] = []  # by the open step, in the order of taking
        self.pending: list[Item] = []  # of taken groups, not in a micro-step yet
        self.eval_outstanding = 0
        self.tickets: list[tuple[int, int, str]] = []  # heap of (evaluation first, ordinal, rollout_id)
        self.ordinal = 0
        # in flight
        self.leases: dict[str, float] = {}
        self.lease_requests: dict[str, list[str]] = {}
        self.claims: dict[tuple[str, str], float] = {}
        self.polls: dict[str, Poll] = {}
        self.replies: OrderedDict[str, Message] = OrderedDict()
        self.infra_in_a_row = 0
        self.engine_lost_at = float("-inf")  # when an engine's loss was last counted
        self.failure = ""
        self.finished_logged = False
        self.progress_at = now.mono
        self.publication_due_since = now.mono
        self.revision = 0  # grows with every change that counters show
        self.effects: list[Effect] = []
        self._load(rows, now)
        if counts is not None:
            self.counts |= counts
            self.admitted = sum(self.counts.values())
        self.meta.total_steps = self._total_steps()

    # --- from the ledger ---

    def _load(self, rows: Iterable[Row], now: Now) -> None:
        for row in rows:
            match row:
                case MetaRow():
                    self.meta = row
                    if row.seed != self.config.run.seed:
                        remedy = "give that seed to go on with the run, or begin another one"
                        raise UsageError("run.toml", f"the ledger was begun with seed {row.seed}, not {self.config.run.seed}", remedy, "run.seed")
                case QueryRow():
                    self.queries[row.query_id] = row
                case GroupRow():
                    self.groups[row.group_id] = row
                case RolloutRow():
                    self.rollouts[row.rollout_id] = row
                case EvalRow():
                    self.evals[row.eval_id] = row
                case StepRow() if row.state is not StepState.VOID:
                    self.steps[row.step] = row
                case MicroStepRow() if row.state is not MicroStepState.COMMITTED:
                    self.micro_steps[row.micro_step_id] = row
                case PublicationRow():
                    self.publication = max(self.publication or row, row, key=lambda p: p.number)
                case _:
                    pass
        self._index(now)

    def _index(self, now: Now) -> None:
        for r in sorted(self.rollouts.values(), key=lambda r: r.ordinal):
            self.ordinal = max(self.ordinal, r.ordinal + 1)
            self.members.setdefault(r.group_id, []).append(r)
            if r.purpose is Purpose.TRAIN:
                self.counts[r.state] += 1
                self.admitted += 1
            elif r.state in UNFINISHED:
                self.eval_outstanding += 1
            if r.state is RolloutState.QUEUED:
                self.push_ticket(r)
            elif r.state in (RolloutState.RUNNING, RolloutState.GRADING):
                self.leases[r.rollout_id] = now.mono + self.config.sandbox.lease_ttl_s
                self.lease_requests.setdefault(r.lease_id, []).append(r.rollout_id)
        claimed = []
        for g in self.groups.values():
            if g.state is GroupState.OPEN:
                self.open[g.group_id] = None
            elif g.state is GroupState.READY:
                self.ready.append((g.ready_seq or 0, g.group_id))
            elif g.state is GroupState.CLAIMED:
                claimed.append((g.ready_seq or 0, g.group_id))
        self.ready.sort()
        self.taken = [group_id for _, group_id in sorted(claimed)]
        packed = {(i.rollout_id, i.index) for m in self.micro_steps.values() for i in m.items}
        self.pending = [i for g in self.taken for i in self.items(g) if (i.rollout_id, i.index) not in packed]
        for m in self.micro_steps.values():
            if m.state is not MicroStepState.QUEUED:
                self.claims[(m.cell, m.incarnation)] = now.mono + self.config.train.claim_ttl_s

    def _total_steps(self) -> int:
        """Where the run ends: after train.steps, or when all epochs are used up."""
        total = self.config.train.steps
        if self.stream.total is not None:
            total = min(total, -(-self.stream.total // self.system.groups_per_step))
        return max(total, self.meta.committed)

    # --- moves ---

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def put(self, row: Row) -> None:
        self.effects.append(Put(row))
        self.revision += 1

    def drop(self, row: Row) -> None:
        self.effects.append(Drop(row))

    def log(self, kind: str, cause: str = "", /, **fields: Any) -> None:
        self.effects.append(Log(kind, fields, cause))

    def reply(self, to: Hashable, message: Message) -> None:
        self.effects.append(Reply(to, message))

    def refuse(self, to: Hashable, request: Message, reason: str, *, stale: bool = False) -> None:
        self.reply(to, Refuse(id="", cause=request.id, reason=reason, stale=stale))

    def remember(self, request_id: str, answer: Message) -> None:
        """Keep an answer for a request that may be sent again; the oldest is forgotten."""
        self.replies[request_id] = answer
        while len(self.replies) > _REPLIES_KEPT:
            self.replies.popitem(last=False)

    def ask(self, now: Now, e: Received, m: P, answer: Callable[[State, Now, Poll, P], bool]) -> None:
        """Answer a request now, or keep it as a poll until `answer` can or its wait is over. Sent again, it is one poll and may wait less."""
        poll = self.polls.get(m.id)
        if poll is None:
            poll = Poll(e.to, m, e.holder, now.mono, now.mono + (m.wait_s if len(self.polls) < _POLLS_KEPT else 0.0))
        else:
            poll.to, poll.deadline = e.to, min(poll.deadline, now.mono + m.wait_s)
        if answer(self, now, poll, m):
            self.polls.pop(m.id, None)
        else:
            self.polls[m.id] = poll

    def add_rollout(self, row: RolloutRow) -> None:
        """A new execution, queued."""
        self.rollouts[row.rollout_id] = row
        self.members.setdefault(row.group_id, []).append(row)
        if row.purpose is Purpose.TRAIN:
            self.counts[row.state] += 1
            self.admitted += 1
        else:
            self.eval_outstanding += 1
        self.push_ticket(row)
        self.put(row)

    def push_ticket(self, row: RolloutRow) -> None:
        heapq.heappush(self.tickets, (row.purpose is Purpose.TRAIN, row.ordinal, row.rollout_id))

    def pop_ticket(self) -> RolloutRow | None:
        """The next queued rollout: evaluation first, then in the order of admission; one issued again keeps its place.
        None before its version (`hold`) is published."""
        while self.tickets:
            row = self.rollouts.get(self.tickets[0][2])
            if row is not None and row.state is RolloutState.QUEUED:
                p = self.published
                if self.config.run.deterministic and (p is None or (p.term, p.step) < (self.meta.term, row.version_step)):
                    return None
                heapq.heappop(self.tickets)
                return row
            heapq.heappop(self.tickets)
        return None

    def hold(self, step: int) -> None:
        """The core went back to `step`: what runs at a later version begins anew when that version is published again."""
        for row in self.rollouts.values():
            if row.purpose is Purpose.TRAIN and row.version_step > step and row.state in UNFINISHED:
                row.version_term = self.meta.term
                if row.state is RolloutState.QUEUED:
                    self.put(row)
                else:
                    row.epoch += 1
                    self.move(row, RolloutState.QUEUED)
                    self.push_ticket(row)

    def move(self, row: RolloutRow, state: RolloutState) -> None:
        """The only place where a rollout's state changes."""
        if row.purpose is Purpose.TRAIN:
            self.counts[row.state] -= 1
            self.counts[state] += 1
        elif row.state in UNFINISHED and state not in UNFINISHED:
            self.eval_outstanding -= 1
        if state not in (RolloutState.RUNNING, RolloutState.GRADING):
            self.leases.pop(row.rollout_id, None)
            if row.lease_id:
                self.lease_requests.pop(row.lease_id, None)
                row.lease_id = ""
        row.state = state
        self.put(row)

    def move_group(self, group: GroupRow, state: GroupState) -> None:
        """The only place where a group's state changes. Its graded rollouts go with it."""
        if group.state is GroupState.OPEN:
            self.open.pop(group.group_id)
        elif group.state is GroupState.READY:
            self.ready.pop(bisect.bisect_left(self.ready, (group.ready_seq or 0, group.group_id)))
        elif group.state is GroupState.CLAIMED:
            self.taken.remove(group.group_id)
        if state is GroupState.READY:
            bisect.insort(self.ready, (group.ready_seq or 0, group.group_id))
        elif state is GroupState.CLAIMED:
            self.taken.append(group.group_id)
        group.state = state
        for row in self.members[group.group_id]:
            if row.state is not RolloutState.DISCARDED:
                self.move(row, RolloutState(state.value))
        self.put(group)

    def forget(self) -> None:
        """Let go of the rows that nothing can happen to any more, unless checkpoints are lost."""
        settled = self.meta.settled
        gone = [
            g.group_id
            for g in self.groups.values()
            if g.state is GroupState.DISCARDED or (g.state is GroupState.CONSUMED and g.step is not None and g.step <= settled)
        ]
        gone += [e.eval_id for e in self.evals.values() if e.void or e.completed_at is not None]
        for group_id in gone:
            self.groups.pop(group_id, None)
            for row in self.members.pop(group_id, ()):
                del self.rollouts[row.rollout_id]
        for step in [n for n in self.steps if n < settled]:
            del self.steps[step]

    def recall(self, rows: Iterable[Row]) -> None:
        """Take back what was forgotten of these rows."""
        for row in rows:
            match row:
                case GroupRow():
                    self.groups.setdefault(row.group_id, row)
                case StepRow() if row.state is StepState.COMMITTED:
                    self.steps.setdefault(row.step, row)
                case RolloutRow() if row.rollout_id not in self.rollouts:
                    self.rollouts[row.rollout_id] = row
                    self.members.setdefault(row.group_id, []).append(row)
                case _:
                    pass

    # --- questions ---

    def next_ready(self) -> GroupRow | None:
        """The group that the open step takes next. With `run.deterministic` none is taken before one that was admitted earlier."""
        if not self.ready:
            return None
        seq, group_id = self.ready[0]
        if self.config.run.deterministic and any(self.members[g][0].ordinal < seq for g in self.open):
            return None
        return self.groups[group_id]

    def items(self, group_id: str) -> list[Item]:
        """Trajectories of a group that bear loss, in the order of packing."""
        rows = sorted(self.members[group_id], key=lambda r: r.position)
        return [i for r in rows if r.state is not RolloutState.DISCARDED for i in r.items if i.n_trainable > 0]

    @property
    def published(self) -> Version | None:
        """The policy; None until the first publication."""
        if self.meta.published_step is None:
            return None
        return Version(self.meta.published_term or 0, self.meta.published_step)

    @property
    def publication_due(self) -> bool:
        """Must the core publish before it can go on?"""
        p = self.published
        if p is None or p.term != self.meta.term:
            return True
        return self.meta.committed > p.step and (
            self.meta.committed - p.step >= self.system.steps_per_burst or self.meta.committed >= self.meta.total_steps
        )

    @property
    def open_step(self) -> StepRow | None:
        return self.steps.get(self.meta.committed + 1)

    @property
    def sealed(self) -> bool:
        """Has the open step a manifest?"""
        step = self.open_step
        return step is not None and step.state is StepState.SEALED

    @property
    def in_system(self) -> int:
        """Groups admitted and not in a committed step."""
        return len(self.open) + len(self.ready) + len(self.taken)

    def in_system_ids(self) -> list[str]:
        return [*self.open, *(group_id for _, group_id in self.ready), *self.taken]

    @property
    def needed(self) -> int:
        """Groups that the rest of the run needs beyond those in the system."""
        m, b = self.meta, self.system.groups_per_step
        step = self.open_step
        whole = m.total_steps - m.committed
        if step is not None and step.closed:
            return (whole - 1) * b - len(self.open) - len(self.ready)
        return whole * b - self.in_system

    @property
    def finished(self) -> bool:
        """All steps committed, the last policy published, its evaluation graded."""
        m = self.meta
        p = self.published
        done = m.committed >= m.total_steps and p is not None and p.step >= m.total_steps and p.term == m.term
        return done and self.eval_outstanding == 0

    def tickets_reply(self, cause: str, message: list[Any]) -> Tickets:
        return Tickets(id="", cause=cause, tickets=message, finished=self.finished or bool(self.failure))
