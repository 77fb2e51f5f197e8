"""The training side of the machine: the core's term, the open step's groups, micro-steps and their claims.

A step's life: open (first claim) → closed (it has all the groups it gets) → sealed (manifest issued) → committed. Invariants:

- Only step committed + 1 takes groups, in the order in which they became ready, with `run.deterministic` in that of their admission; so the same
  groups in the same order give the same steps.
- A step closes with fewer than B groups only when nothing that could still come would come before it commits, or when groups that are dropped for
  equal rewards do not end; its event says so.
- A micro-step is claimed by one (cell, incarnation). Losing a claim's lease voids the whole incarnation: all its uncommitted micro-steps are
  queued again.
- A lower term is refused. A new term rolls back what its checkpoint does not contain: those groups are ready again, in their old order.

- A sealed step waits for its core: leases do not run out in it and a cell that comes back is kept waiting, so that what the core reduced is what it
  commits. Only `VoidIncarnations`, by the core or by a cell for itself, or a new term opens it again.

Not here: payloads (the shell reads them when it delivers a micro-step). Sealing and committing are in `commit`.
"""

from __future__ import annotations

from collections.abc import Hashable

from gyre.buffer import admit
from gyre.buffer.effects import Deliver, Now, Received
from gyre.buffer.pack import pack
from gyre.buffer.state import Poll, State
from gyre.rules.microstep import MICROSTEP_TRANSITIONS, MicroStepEvent
from gyre.types import MicroStepState, PackedTrajectory, RolloutState
from gyre.wire import messages as w
from gyre.wire.rows import GroupState, MicroStepRow, StepRow, StepState


def on_acquire(s: State, now: Now, to: Hashable, m: w.AcquireTerm) -> None:
    """A core starts at `step`: grant a new term, roll back what the checkpoint does not contain."""
    meta = s.meta
    if (known := s.replies.get(m.id)) is not None:
        s.reply(to, known)
        return
    if left_lineage(s, m):
        s.refuse(to, m, f"the checkpoint at step {m.step} of term {m.checkpoint_term} is of a lineage that was left", stale=True)
        return
    if not 0 <= m.step <= meta.committed:
        s.refuse(to, m, f"the checkpoint at step {m.step} is ahead of this ledger, whose last committed step is {meta.committed}")
        return
    if m.step < meta.pruned:
        kept = 'run.keep_payloads is "needed"'
        s.refuse(to, m, f"the checkpoint at step {m.step} is too old: what was trained up to step {meta.pruned} is not kept ({kept})")
        return
    if m.fresh and meta.committed:
        s.refuse(to, m, f"the run has {meta.committed} steps already; start the core with --resume")
        return
    replayed = list(s.taken)
    _drop_open_step(s)
    for step in range(meta.committed, m.step, -1):
        row = s.steps.pop(step)
        row.state = StepState.VOID
        s.put(row)
        replayed += row.groups
    for group_id in replayed:
        group = s.groups[group_id]
        group.step = group.taken_at = None
        s.move_group(group, GroupState.READY)
    admit.void_evals(s, m.step)
    lost = meta.committed - m.step
    meta.term += 1
    meta.core, meta.committed, meta.voided = m.cell, m.step, []
    meta.checkpoints = [c for c in meta.checkpoints if c <= m.step]
    if s.config.run.deterministic:
        s.hold(m.step)
    if meta.checkpoint_step is not None and m.step < meta.checkpoint_step:
        meta.checkpoint_step, meta.checkpoint_path = m.step, ""
    s.put(meta)
    s.progress_at = s.publication_due_since = now.mono
    s.log("term", m.id, term=meta.term, cell=m.cell, step=m.step, steps_replayed=lost, groups_ready_again=len(replayed))
    answer = w.TermGranted(id="", cause=m.id, term=meta.term, step=m.step, total_steps=meta.total_steps)
    s.remember(m.id, answer)
    s.reply(to, answer)


def left_lineage(s: State, m: w.AcquireTerm) -> bool:
    """Did a later term go back behind this checkpoint? A core that was taken for dead may write one long after its term ended."""
    if not 0 < m.checkpoint_term < s.meta.term:
        return False
    step = s.steps.get(m.step)
    return m.step > s.meta.committed or (step is not None and step.term > m.checkpoint_term)


def _drop_open_step(s: State) -> None:
    """Forget the micro-steps of the uncommitted step, and the step itself."""
    for micro in s.micro_steps.values():
        s.drop(micro)
    s.micro_steps.clear()
    s.pending.clear()
    s.claims.clear()
    step = s.open_step
    if step is not None:
        s.drop(step)
        del s.steps[step.step]


def refused(s: State, to: Hashable, m: w.Message, term: int, step: int | None = None, cell: str = "", incarnation: str = "") -> bool:
    """Refuse what comes under another term, for another step, or from a voided incarnation."""
    if term != s.meta.term:
        s.refuse(to, m, f"term {term} is not the core's term {s.meta.term}", stale=term < s.meta.term)
    elif step is not None and step != s.meta.committed + 1:
        s.refuse(to, m, f"step {step} is not the open step {s.meta.committed + 1}", stale=step <= s.meta.committed)
    elif incarnation and name(cell, incarnation) in s.meta.voided:
        s.refuse(to, m, f"incarnation {incarnation} of cell {cell} was voided: zero the gradients and rejoin as a new one", stale=True)
    else:
        return False
    return True


def name(cell: str, incarnation: str) -> str:
    return f"{cell}/{incarnation}"


# --- taking, packing, claiming ---


def on_claim(s: State, now: Now, e: Received, m: w.ClaimMicroStep) -> None:
    """Answer now, or become a poll. The same request again gets the same micro-step."""
    if refused(s, e.to, m, m.term, m.step, m.cell, m.incarnation):
        return
    if m.step > s.meta.total_steps:
        s.refuse(e.to, m, f"the run ends at step {s.meta.total_steps}")
        return
    if not s.sealed:
        for cell, incarnation in [c for c in s.claims if c[0] == m.cell and c[1] != m.incarnation]:
            void(s, cell, incarnation, "the cell came back as another incarnation", m.id)
    if (known := s.replies.get(m.id)) is not None:
        s.reply(e.to, known)
        return
    for micro in s.micro_steps.values():
        if micro.claim_id == m.id:
            deliver(s, e.to, micro, m.id)
            return
    s.ask(now, e, m, answer_claim)


def answer_claim(s: State, now: Now, poll: Poll, m: w.ClaimMicroStep) -> bool:
    """Claim the next micro-step if there is one; say so if the step is drained, or at the end of the wait."""
    if m.term != s.meta.term or m.step != s.meta.committed + 1 or s.failure:
        s.refuse(poll.to, m, s.failure or f"step {m.step} of term {m.term} is over", stale=not s.failure)
        return True
    step = refill(s, now, m.id)
    micro = next((x for x in s.micro_steps.values() if x.state is MicroStepState.QUEUED), None)
    if micro is not None:
        micro.state = MICROSTEP_TRANSITIONS[micro.state, MicroStepEvent.CLAIM]
        micro.cell, micro.incarnation, micro.claim_id = m.cell, m.incarnation, m.id
        s.put(micro)
        s.claims[(m.cell, m.incarnation)] = now.mono + s.config.train.claim_ttl_s
        s.progress_at = now.mono
        deliver(s, poll.to, micro, m.id)
        return True
    # A cell asks for more than there is only when it holds nothing: what it has claimed was in an answer that it never saw.
    lost = next((x for x in s.micro_steps.values() if x.state is MicroStepState.CLAIMED and (x.cell, x.incarnation) == (m.cell, m.incarnation)), None)
    if step.closed and lost is not None:
        deliver(s, poll.to, lost, m.id)
        return True
    if step.closed or now.mono >= poll.deadline:
        answer = w.NothingToClaim(id="", cause=m.id, drained=step.closed, waiting_for="" if step.closed else waiting_for(s))
        s.remember(m.id, answer)  # a repetition that arrives after this answer must not become a claim that nobody waits for
        s.reply(poll.to, answer)
        return True
    return False


def refill(s: State, now: Now, cause: str) -> StepRow:
    """Take ready groups into the open step, close it if no more can come, pack what can be packed."""
    step = s.open_step
    if step is None:
        step = StepRow(s.meta.term, s.meta.committed + 1, now.wall)
        s.steps[step.step] = step
        s.put(step)
    if step.closed:
        return step
    before = len(s.taken)
    while len(s.taken) < s.system.groups_per_step and (group := s.next_ready()) is not None:
        group.step, group.taken_at = step.step, now.wall
        s.move_group(group, GroupState.CLAIMED)
        s.pending += s.items(group.group_id)
    if len(s.taken) != before:
        s.progress_at = now.mono
        admit.admit(s, now, cause)
    if closes(s):
        step.closed = True
        s.meta.uniform_in_a_row = 0
        s.put(s.meta)
        step.groups = list(s.taken)
        s.put(step)
        short = s.system.groups_per_step - len(s.taken)
        s.log("step_closed", cause, step=step.step, groups=len(s.taken), short=short, discarded_by_reason=dict(s.meta.discards) if short else {})
    train = s.config.train
    packs, s.pending = pack(s.pending, train.micro_step_tokens, flush=step.closed, whole=train.prefix_tree)
    for items in packs:
        n = len(s.micro_steps)
        row = MicroStepRow(f"s{step.step}.t{step.term}.m{n}", step.term, step.step, n, items, sum(i.n_tokens for i in items))
        s.micro_steps[row.micro_step_id] = row
        s.put(row)
    return step


def closes(s: State) -> bool:
    """Has the open step all the groups it gets? With fewer than B, only if none is out or ready and none would be admitted before it commits, or if
    continuous dispatch brings nothing but groups of equal rewards."""
    if len(s.taken) >= s.system.groups_per_step or (s.system.dispatch == "continuous" and not s.ready and admit.hopeless(s)):
        return True
    if s.open or s.ready or s.published is None:
        return False
    if s.stream.left(s.meta.queries_drawn) == 0:
        return True
    return s.system.dispatch == "boundary" and not s.publication_due


def waiting_for(s: State) -> str:
    """What the open step waits for, for people."""
    have = f"step {s.meta.committed + 1} has {len(s.taken)} of {s.system.groups_per_step} groups"
    if s.published is None or (not s.open and s.publication_due):
        return f"{have}; a publication of version {s.meta.committed} is due"
    c = s.counts
    running, queued = c[RolloutState.RUNNING] + c[RolloutState.GRADING], c[RolloutState.QUEUED]
    return f"{have}; {len(s.open)} groups are out: {running} rollouts running, {queued} tickets without a sandbox"


def deliver(s: State, to: Hashable, micro: MicroStepRow, cause: str) -> None:
    """Send a micro-step's trajectories."""
    rows = {i.rollout_id: s.rollouts[i.rollout_id] for i in micro.items}
    totals = {r: sum(x.n_trainable for x in row.items) for r, row in rows.items()}
    packed = [
        PackedTrajectory(
            trajectory_id=f"{i.rollout_id}.{i.index}",
            rollout_id=i.rollout_id,
            group_id=rows[i.rollout_id].group_id,
            n_tokens=i.n_tokens,
            n_trainable=i.n_trainable,
            execution_trainable=totals[i.rollout_id],
            advantage=rows[i.rollout_id].advantage or 0.0,
            reward=rows[i.rollout_id].reward or 0.0,
            version_at_dispatch=rows[i.rollout_id].version_step,
        )
        for i in micro.items
    ]
    message = w.MicroStepClaimed(
        id="", cause=cause, micro_step_id=micro.micro_step_id, step=micro.step, lease_ttl_s=s.config.train.claim_ttl_s, trajectories=packed
    )
    s.emit(Deliver(to, message, list(micro.items), rows))


def on_renew(s: State, now: Now, to: Hashable, m: w.RenewClaims) -> None:
    """Extend the lease of a cell's claims."""
    if refused(s, to, m, m.term, None, m.cell, m.incarnation):
        return
    if (m.cell, m.incarnation) in s.claims:
        s.claims[(m.cell, m.incarnation)] = now.mono + s.config.train.claim_ttl_s
    s.reply(to, w.Ack(id="", cause=m.id))


def on_accumulated(s: State, now: Now, to: Hashable, m: w.Accumulated) -> None:
    """claimed → accumulated."""
    if refused(s, to, m, m.term, m.step, m.cell, m.incarnation):
        return
    micro = s.micro_steps.get(m.micro_step_id)
    if micro is None or (micro.cell, micro.incarnation) != (m.cell, m.incarnation):
        s.refuse(to, m, f"micro-step {m.micro_step_id} is not claimed by incarnation {m.incarnation} of cell {m.cell}", stale=True)
        return
    if micro.state is MicroStepState.CLAIMED:
        micro.state = MICROSTEP_TRANSITIONS[micro.state, MicroStepEvent.ACCUMULATE]
        s.put(micro)
    s.claims[(m.cell, m.incarnation)] = now.mono + s.config.train.claim_ttl_s
    s.progress_at = now.mono
    s.reply(to, w.Ack(id="", cause=m.id))


def expire_claims(s: State, now: Now) -> None:
    """Incarnations that were not heard of. A sealed step waits for its core: only a new term undoes it."""
    if s.sealed:
        return
    for cell, incarnation in [c for c, deadline in s.claims.items() if deadline <= now.mono]:
        void(s, cell, incarnation, "its lease expired", "")


def on_void(s: State, now: Now, to: Hashable, m: w.VoidIncarnations) -> None:
    """Give up accumulators of the open or sealed step; the survivors' leases begin anew, however long the step was sealed."""
    if refused(s, to, m, m.term, m.step):
        return
    for member in m.cells:
        if name(member.cell, member.incarnation) not in s.meta.voided:
            void(s, member.cell, member.incarnation, m.reason, m.id)
    for claim in s.claims:
        s.claims[claim] = now.mono + s.config.train.claim_ttl_s
    s.progress_at = now.mono
    s.reply(to, w.Ack(id="", cause=m.id))


def void(s: State, cell: str, incarnation: str, reason: str, cause: str) -> None:
    """Queue again all that an incarnation claimed or accumulated in the open step, and refuse it from now on."""
    again = []
    for micro in s.micro_steps.values():
        if (micro.cell, micro.incarnation) == (cell, incarnation):
            micro.state = MICROSTEP_TRANSITIONS[micro.state, MicroStepEvent.VOID]
            micro.cell = micro.incarnation = micro.claim_id = ""
            s.put(micro)
            again.append(micro.micro_step_id)
    s.claims.pop((cell, incarnation), None)
    s.meta.voided = [*s.meta.voided, name(cell, incarnation)]
    s.put(s.meta)
    step = s.open_step
    if step is not None and s.sealed:
        step.state, step.hash, step.manifest = StepState.OPEN, "", {}
        s.put(step)
    s.log("voided", cause, cell=cell, incarnation=incarnation, reason=reason, micro_steps=again)
