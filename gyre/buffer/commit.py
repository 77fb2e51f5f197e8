"""The end of a step in the machine: seal, commit, checkpoint.

Invariants
- A manifest is issued when nothing is outstanding, is fixed by its hash, and is the same however often it is asked for.
- A commit is idempotent by (term, step, hash); only then are the step's groups consumed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable

import msgspec

from gyre.buffer import admit
from gyre.buffer.effects import Now, Prune, Received
from gyre.buffer.sandboxes import RUN_ENDED, discard_group
from gyre.buffer.state import Poll, State
from gyre.buffer.training import name, refill, refused, waiting_for
from gyre.rules import staleness
from gyre.rules.microstep import MICROSTEP_TRANSITIONS, MicroStepEvent
from gyre.types import MicroStepState, RolloutState
from gyre.wire.messages import Ack, CheckpointSaved, CommitStep, Manifest, ManifestEntry, NothingToClaim, SealStep, StepStats
from gyre.wire.rows import GroupState, StepRow, StepState


def on_seal(s: State, now: Now, e: Received, m: SealStep) -> None:
    """Issue the manifest once nothing is outstanding, or become a poll."""
    if refused(s, e.to, m, m.term, m.step):
        return
    if m.step > s.meta.total_steps:
        s.refuse(e.to, m, f"the run ends at step {s.meta.total_steps}")
        return
    s.ask(now, e, m, answer_seal)


def answer_seal(s: State, now: Now, poll: Poll, m: SealStep) -> bool:
    """The manifest, or that there is still something to claim, or (at the end of the wait) what is outstanding."""
    if m.term != s.meta.term or m.step != s.meta.committed + 1 or s.failure:
        s.refuse(poll.to, m, s.failure or f"step {m.step} of term {m.term} is over", stale=not s.failure)
        return True
    step = refill(s, now, m.id)
    states = Counter(x.state for x in s.micro_steps.values())
    if not step.closed or states[MicroStepState.QUEUED]:
        reason = waiting_for(s) if not step.closed else f"{states[MicroStepState.QUEUED]} micro-steps are queued: claim them first"
        s.reply(poll.to, NothingToClaim(id="", cause=m.id, drained=False, waiting_for=reason))
        return True
    if states[MicroStepState.CLAIMED]:
        if now.mono < poll.deadline:
            return False
        who = sorted({name(x.cell, x.incarnation) for x in s.micro_steps.values() if x.state is MicroStepState.CLAIMED})
        s.reply(poll.to, NothingToClaim(id="", cause=m.id, drained=False, waiting_for=f"claims of {', '.join(who)}"))
        return True
    if step.state is not StepState.SEALED:
        _seal(s, now, step, m.id)
    manifest = msgspec.convert(step.manifest, Manifest)
    s.reply(poll.to, msgspec.structs.replace(manifest, cause=m.id))
    return True


def _seal(s: State, now: Now, step: StepRow, cause: str) -> None:
    """Fix the manifest: who accumulated what, the step's statistics, and a hash of exactly this content."""
    by_cell: dict[tuple[str, str], list[str]] = {}
    for micro in s.micro_steps.values():
        by_cell.setdefault((micro.cell, micro.incarnation), []).append(micro.micro_step_id)
    entries = [ManifestEntry(cell, incarnation, sorted(ids)) for (cell, incarnation), ids in sorted(by_cell.items())]
    statistics = stats(s, step)
    content = [step.term, step.step, entries, statistics, step.groups, [m.items for m in s.micro_steps.values()]]
    step.hash = hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).hexdigest()
    manifest = Manifest(id="", term=step.term, step=step.step, entries=entries, stats=statistics, hash=step.hash)
    step.manifest = msgspec.to_builtins(manifest)
    step.state, step.sealed_at, step.micro_steps = StepState.SEALED, now.wall, len(s.micro_steps)
    s.put(step)
    s.log("sealed", cause, step=step.step, term=step.term, hash=step.hash, micro_steps=step.micro_steps)


def stats(s: State, step: StepRow) -> StepStats:
    """What the ledger knows about the groups of a closed step; staleness is measured at v_t = step - 1."""
    groups = [s.groups[g] for g in step.groups]
    graded = [r for g in step.groups for r in s.members[g] if r.state is not RolloutState.DISCARDED]
    items = [i for m in s.micro_steps.values() for i in m.items]
    rewards = [r.reward or 0.0 for r in graded]
    measured = staleness.summarize([staleness.discrete(step.step - 1, g.version_step) for g in groups])
    between = staleness.summarize([d for g in groups if (d := admit.interpolated(g, step.step - 1)) is not None])
    return StepStats(
        groups=len(groups),
        executions=len(graded),
        trajectories=len(items),
        tokens=sum(i.n_tokens for i in items),
        trainable_tokens=sum(i.n_trainable for i in items),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        staleness_mean=measured.mean,
        staleness_p95=measured.p95,
        staleness_max=measured.max,
        staleness_interpolated=between.mean,
        staleness_predicted=s.quota.predicted,
        discarded_groups=s.system.groups_per_step - len(groups),
        uniform_groups=sum(g.uniform for g in groups),
    )


def on_commit(s: State, now: Now, to: Hashable, m: CommitStep) -> None:
    """The core has updated: the step's groups are consumed. Idempotent by (term, step, hash)."""
    done = s.steps.get(m.step)
    if done is not None and done.state is StepState.COMMITTED and (done.term, done.hash) == (m.term, m.hash):
        s.reply(to, Ack(id="", cause=m.id))
        return
    if refused(s, to, m, m.term, m.step):
        return
    step = s.open_step
    if step is None or step.state is not StepState.SEALED or step.hash != m.hash:
        s.refuse(to, m, f"step {m.step} has no manifest {m.hash}: seal it again", stale=True)
        return
    without = Counter(
        str(r.ending) for g in step.groups for r in s.members[g] if r.state is not RolloutState.DISCARDED and not any(i.n_trainable for i in r.items)
    )
    for group_id in step.groups:
        s.move_group(s.groups[group_id], GroupState.CONSUMED)
    for micro in s.micro_steps.values():
        micro.state = MICROSTEP_TRANSITIONS[micro.state, MicroStepEvent.COMMIT]
        s.put(micro)
    s.micro_steps.clear()
    s.claims.clear()
    step.state, step.committed_at, step.metrics = StepState.COMMITTED, now.wall, _finite(m.metrics)
    s.put(step)
    discards, s.meta.discards = s.meta.discards, {}
    s.meta.committed = step.step
    s.put(s.meta)
    s.progress_at = s.publication_due_since = now.mono
    s.log(
        "step", m.id, term=step.term, step=step.step, hash=step.hash, stats=step.manifest["stats"], metrics=step.metrics,
        micro_steps=step.micro_steps, entries=step.manifest["entries"], groups=step.groups, executions_without_trainable=dict(without),
        groups_discarded=discards, opened_at=step.opened_at, sealed_at=step.sealed_at,
    )  # fmt: skip
    s.reply(to, Ack(id="", cause=m.id))
    if s.meta.committed >= s.meta.total_steps:
        for group_id in list(s.open):
            discard_group(s, now, group_id, RUN_ENDED, m.id)


def _finite(metrics: dict[str, float | None]) -> dict[str, float | None]:
    return {k: v if v is not None and math.isfinite(v) else None for k, v in metrics.items()}


def on_checkpoint(s: State, now: Now, to: Hashable, m: CheckpointSaved) -> None:
    """A checkpoint is complete: what was consumed up to it leaves memory; up to the oldest that is kept it may leave the disk as well."""
    if refused(s, to, m, m.term):
        return
    if m.step > s.meta.committed:
        s.refuse(to, m, f"step {m.step} is not committed; the last is {s.meta.committed}")
        return
    if (s.meta.checkpoint_step, s.meta.checkpoint_path) != (m.step, m.path):
        s.meta.checkpoint_step, s.meta.checkpoint_path = m.step, m.path
        kept = s.config.train.keep_checkpoints
        s.meta.checkpoints = [*(c for c in s.meta.checkpoints if c < m.step), m.step][-kept:]
        if s.config.run.keep_payloads == "needed" and len(s.meta.checkpoints) == kept:
            s.meta.pruned = max(s.meta.pruned, min(s.meta.checkpoints[0], s.meta.settled))
            s.emit(Prune(s.meta.pruned))
        s.put(s.meta)
        s.log("checkpoint", m.id, step=m.step, term=m.term, path=m.path)
        s.forget()
    s.reply(to, Ack(id="", cause=m.id))
