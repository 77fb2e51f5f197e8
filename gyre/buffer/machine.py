"""The buffer's machine: one door, `handle(now, input) -> effects`. Pure: no I/O, no clock, no randomness.

Invariants
- Every input ends with admission topped up and every poll answered that can be answered, so nothing waits for the next message.
- The counts of `counters()` add up to the executions admitted, after every input.
- The same rows and inputs give the same effects; a machine built from the ledger's rows goes on where the last one was (leases armed anew).

Where the rest is: `state` (rows and moves), `admit` (quota, publications, evaluation), `sandboxes` (leases, endings, groups), `training` (term,
claims), `commit` (the end of a step).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from gyre.buffer import admit, commit, sandboxes, training
from gyre.buffer.effects import Effect, Input, Log, Now, Received, Tick
from gyre.buffer.queries import TaskSet
from gyre.buffer.state import State
from gyre.config import Config
from gyre.types import UNFINISHED, RolloutState, Version
from gyre.wire import messages as w
from gyre.wire.rows import Row


class Machine:
    """See the module. Raises `UsageError` for a configuration that cannot work."""

    def __init__(
        self, config: Config, tasks: TaskSet, rows: Iterable[Row], now: Now, run_id: str = "", counts: Mapping[RolloutState, int] | None = None,
        coordinated: bool = False,
    ) -> None:  # fmt: skip
        self.state = State(config, tasks, rows, now, run_id, counts)
        self._stall_logged_at = now.mono
        self._coordinated = coordinated

    def start(self, now: Now) -> list[Effect]:
        """First effects of a life: the meta row, and what the run will be."""
        s = self.state
        s.put(s.meta)
        s.log(
            "buffer_started", dispatch=s.system.dispatch, quota=s.quota.groups, staleness_target=s.quota.target,
            staleness_predicted=s.quota.predicted, total_steps=s.meta.total_steps, configured_steps=s.config.train.steps,
            queries=s.stream.total, tasks=len(s.tasks.train), heldout=len(s.tasks.heldout), step=s.meta.committed, term=s.meta.term,
            admitted=s.admitted, groups_per_step=s.system.groups_per_step, rollouts_per_group=s.system.rollouts_per_group,
            steps_per_burst=s.system.steps_per_burst,
        )  # fmt: skip
        return self._after(now, "")

    def handle(self, now: Now, e: Input) -> list[Effect]:
        """Take one input; the effects are in order."""
        match e:
            case Received():
                self._receive(now, e)
                return self._after(now, e.message.id)
            case Tick():
                sandboxes.expire_leases(self.state, now)
                training.expire_claims(self.state, now)
                self._watch(now)
                return self._after(now, "")
            case _:
                assert_never(e)

    def missing(self, message: w.Message) -> int | None:
        """The step from which on the ledger's rows must come back (`recall`) before this message is handled; None: nothing is missing."""
        return message.step if isinstance(message, w.AcquireTerm) and message.step < self.state.meta.settled else None

    def recall(self, rows: Iterable[Row]) -> None:
        """Take rows back into memory."""
        self.state.recall(rows)

    def _receive(self, now: Now, e: Received) -> None:
        s, to = self.state, e.to
        match e.message:
            case w.LeaseTickets() as m:
                sandboxes.on_lease(s, now, e, m)
            case w.RenewLeases() as m:
                sandboxes.on_renew(s, now, to, m)
            case w.GradingStarted() as m:
                sandboxes.on_grading(s, now, to, m)
            case w.RolloutEnded() as m:
                sandboxes.on_ended(s, now, e, m)
            case w.AcquireTerm() as m:
                training.on_acquire(s, now, to, m)
            case w.ClaimMicroStep() as m:
                training.on_claim(s, now, e, m)
            case w.RenewClaims() as m:
                training.on_renew(s, now, to, m)
            case w.Accumulated() as m:
                training.on_accumulated(s, now, to, m)
            case w.SealStep() as m:
                commit.on_seal(s, now, e, m)
            case w.VoidIncarnations() as m:
                training.on_void(s, now, to, m)
            case w.CommitStep() as m:
                commit.on_commit(s, now, to, m)
            case w.Published() as m:
                admit.on_published(s, now, to, m)
            case w.CheckpointSaved() as m:
                commit.on_checkpoint(s, now, to, m)
            case w.Note() as m:
                if s.replies.get(m.id) is None:
                    fields = {**m.fields, **self._standstill(now)} if m.event == "stall" else m.fields
                    s.emit(Log(m.event, fields, m.cause, e.holder))
                    s.remember(m.id, w.Ack(id="", cause=m.id))
                s.reply(to, w.Ack(id="", cause=m.id))
            case other:
                s.refuse(to, other, f"{type(other).__name__} is not for the buffer")

    def _after(self, now: Now, cause: str) -> list[Effect]:
        s = self.state
        if s.system.dispatch == "continuous":
            admit.admit(s, now, cause)
        self._answer_polls(now)
        if s.finished and not s.finished_logged:
            s.finished_logged = True
            s.revision += 1
            s.log("finished", cause, step=s.meta.committed, counts={k.value: v for k, v in s.counts.items()})
        elif not s.finished:
            s.finished_logged = False
        effects, s.effects = s.effects, []
        return effects

    def _answer_polls(self, now: Now) -> None:
        """Claims and seals first: taking groups may admit others, whose tickets the lease polls then get."""
        s = self.state
        for key, poll in sorted(s.polls.items(), key=lambda p: isinstance(p[1].message, w.LeaseTickets)):
            match poll.message:
                case w.LeaseTickets() as m:
                    done = bool(s.tickets or s.finished or s.failure or now.mono >= poll.deadline) and sandboxes.answer_lease(s, now, poll, m)
                case w.ClaimMicroStep() as m:
                    done = training.answer_claim(s, now, poll, m)
                case w.SealStep() as m:
                    done = commit.answer_seal(s, now, poll, m)
                case unreachable:
                    assert_never(unreachable)
            if done:
                del s.polls[key]

    # --- what others look at ---

    def next_deadline(self) -> float | None:
        """Monotonic time at which a `Tick` is due, if nothing else happens."""
        s = self.state
        claims = () if s.sealed else s.claims.values()
        times = [*s.leases.values(), *claims, *(p.deadline for p in s.polls.values())]
        times.append(self._stall_at())
        return min(times, default=None)

    @property
    def finished(self) -> bool:
        return self.state.finished

    @property
    def failure(self) -> str:
        return self.state.failure

    @property
    def saved(self) -> bool:
        """Is the last step in a checkpoint?"""
        return self.state.meta.checkpoint_step == self.state.meta.committed

    @property
    def revision(self) -> int:
        """Grows whenever `counters` may have changed."""
        return self.state.revision

    def counters(self, message_id: str = "", cause: str = "") -> w.Counters:
        """The snapshot. The states add up to the executions admitted: a bug otherwise."""
        s = self.state
        assert sum(s.counts.values()) == s.admitted, (s.counts, s.admitted)
        return w.Counters(
            id=message_id,
            cause=cause,
            seq=s.revision,
            admitted=s.admitted,
            states={k.value: v for k, v in s.counts.items()},
            water_level=sum(s.counts[k] for k in UNFINISHED),
            step=s.meta.committed,
            total_steps=s.meta.total_steps,
            published=s.published or Version(0, 0),
            term=s.meta.term,
            groups_open=len(s.open) + len(s.ready),
            eval_outstanding=s.eval_outstanding,
            finished=s.finished,
            failure=s.failure,
            ready_groups=len(s.ready),
            taken_groups=len(s.taken),
            publications=s.meta.publications,
        )

    def waits(self, now: Now) -> list[dict[str, Any]]:
        """Who waits for whom, and since when (seconds ago)."""
        s = self.state
        found: list[dict[str, Any]] = []
        for poll in s.polls.values():
            what = "tickets" if isinstance(poll.message, w.LeaseTickets) else training.waiting_for(s)
            found.append({"who": poll.holder, "for": what, "since_s": now.mono - poll.since})
        holders: dict[str, list[float]] = {}
        for rollout_id in s.leases:
            row = s.rollouts[rollout_id]
            holders.setdefault(row.holder, []).append(now.wall - (row.leased_at or now.wall))
        found += [{"who": "buffer", "for": f"{len(v)} rollouts of {holder}", "since_s": max(v)} for holder, v in sorted(holders.items())]
        found += [{"who": "buffer", "for": f"micro-steps of {cell}/{incarnation}", "since_s": None} for cell, incarnation in sorted(s.claims)]
        if s.publication_due and not s.finished:
            since = now.mono - s.publication_due_since
            found.append({"who": "buffer", "for": f"{s.meta.core or 'a core'} to publish version {s.meta.committed}", "since_s": since})
        if s.counts[RolloutState.QUEUED] and not any(isinstance(p.message, w.LeaseTickets) for p in s.polls.values()):
            found.append({"who": "buffer", "for": f"a sandbox for {s.counts[RolloutState.QUEUED]} tickets", "since_s": now.mono - s.progress_at})
        return found

    def _stall_at(self) -> float:
        """When to speak of a stall if nothing progresses. A coordinator, which knows who loads and has everybody's stacks, is to speak first; where
        a publication is due, a trainer or an engine may be loading."""
        s = self.state
        loading = self._coordinated or s.publication_due or not s.meta.publications
        return max(s.progress_at, self._stall_logged_at) + s.config.run.stall_s + (s.config.run.start_timeout_s if loading else 0.0)

    def _standstill(self, now: Now) -> dict[str, Any]:
        """What this process knows of a stall; the next is spoken of only when as much time has passed again."""
        s = self.state
        self._stall_logged_at = now.mono
        counts = {k.value: v for k, v in s.counts.items()}
        return {
            "idle_s": now.mono - s.progress_at, "counts": counts, "step": s.meta.committed, "term": s.meta.term, "groups_open": len(s.open),
            "groups_ready": len(s.ready), "groups_taken": len(s.taken), "waits": self.waits(now),
        }  # fmt: skip

    def _watch(self, now: Now) -> None:
        if now.mono >= self._stall_at():
            fields = self._standstill(now)
            if not self.state.finished:
                self.state.log("stall", **fields)
