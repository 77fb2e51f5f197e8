"""Admission, publication and evaluation: when groups and evaluation tickets are issued.

Invariants
- Never more groups in the system than the quota, never more than the rest of the run needs, so a resume brings no burst of admissions.
- Boundary dispatch admits at publications (and substitutes, where `on_discard` says so); continuous dispatch whenever there is room.
- An evaluation belongs to one published version: number 0, every `tasks.eval_every`-th, and the last. It is issued once in the lineage that survives.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from gyre.buffer.effects import Now
from gyre.buffer.queries import derive_seed
from gyre.buffer.state import State
from gyre.rules import admission, staleness
from gyre.types import Purpose, RolloutState, Version
from gyre.wire.messages import Ack, Published
from gyre.wire.rows import EvalRow, GroupRow, GroupState, PublicationRow, QueryRow, RolloutRow, evaluated

UNIFORM: Final = "uniform_rewards"
"""Why groups are discarded whose rewards are all equal, where `train.drop_uniform` says so."""

_UNIFORM_STEPS: Final = 4  # uniform groups in a row, in steps' worth, after which a step makes do with what it has


def on_published(s: State, now: Now, to: Hashable, m: Published) -> None:
    """A version became the policy: admit up to the quota, evaluate if it is its turn."""
    meta, p = s.meta, s.published
    if m.version.term != meta.term or meta.term == 0:
        s.refuse(to, m, f"term {m.version.term} is not the core's term {meta.term}", stale=m.version.term < meta.term)
        return
    if p is not None and p.term == meta.term and m.version.step <= p.step:
        if m.version.step == p.step:
            s.reply(to, Ack(id="", cause=m.id))
        else:
            s.refuse(to, m, f"version {m.version.step} is older than the published {p.step}", stale=True)
        return
    if m.version.step > meta.committed:
        s.refuse(to, m, f"version {m.version.step} contains steps that are not committed; the last is {meta.committed}")
        return
    row = PublicationRow(meta.publications, m.version.term, m.version.step, now.wall, list(m.cells), m.seconds)
    measured = _measure(s, row)
    s.publication = row
    meta.published_term, meta.published_step, meta.published_at = m.version.term, m.version.step, now.wall
    meta.publications += 1
    s.put(row)
    s.put(meta)
    s.progress_at = now.mono
    s.log(
        "publication", m.id, number=row.number, term=row.term, step=row.step, cells=row.cells, seconds=row.seconds,
        staleness_predicted=s.quota.predicted, staleness_target=s.quota.target, quota=s.quota.groups, **measured,
    )  # fmt: skip
    s.reply(to, Ack(id="", cause=m.id))
    evaluate(s, now, m.id)
    admit(s, now, m.id, at_publication=True)
    s.forget()


def _measure(s: State, publication: PublicationRow) -> dict[str, dict[str, float | int | None]]:
    """Close the interval since the last publication: its groups' fractions are known now. Staleness offered (of groups ready or taken now, were they
    consumed at this version) and trained (of groups consumed since the last publication)."""
    last = s.publication
    since = last.step if last is not None else 0
    inside = [s.groups[g] for g in s.in_system_ids()]
    consumed = [(step, s.groups[g]) for step in range(since + 1, s.meta.committed + 1) if step in s.steps for g in s.steps[step].groups]
    if last is not None:
        for g in inside + [g for _, g in consumed]:
            if g.publication == last.number and g.version_next is None:
                g.fraction = staleness.fraction_of_interval(g.admitted_at, last.at, publication.at)
                g.version_next = publication.step
                s.put(g)
    offered = [g for g in inside if g.state is not GroupState.OPEN]
    trained = [g for step, g in consumed if step <= publication.step]

    def both(groups: list[GroupRow], v_t: int | None) -> dict[str, float | int | None]:
        d = [staleness.discrete((g.step or 1) - 1 if v_t is None else v_t, g.version_step) for g in groups]
        i = [x for g in groups if (x := interpolated(g, (g.step or 1) - 1 if v_t is None else v_t)) is not None]
        ds, it = staleness.summarize(d), staleness.summarize(i)
        return {"n": ds.n, "mean": ds.mean, "p95": ds.p95, "max": ds.max, "interpolated": it.mean}

    return {"offered": both(offered, publication.step), "trained": both(trained, None)}


def interpolated(group: GroupRow, v_t: int) -> float | None:
    """Interpolated staleness of a group; None until the publication after its admission."""
    if group.fraction is None or group.version_next is None:
        return 0.0 if v_t <= group.version_step else None
    return staleness.interpolated(v_t, group.version_step, group.version_next, group.fraction)


def admit(s: State, now: Now, cause: str, *, at_publication: bool = False) -> None:
    """Admit what the rule allows now."""
    if s.published is None or s.failure:
        return
    left = s.stream.left(s.meta.queries_drawn)
    if s.system.dispatch == "continuous":
        n = admission.admit(s.quota.groups, len(s.open) + len(s.ready), s.needed, left)
    elif at_publication:
        n = admission.admit(s.quota.groups, s.in_system, s.needed, left)
    else:
        return
    for _ in range(n):
        admit_one(s, now, cause)


def admit_one(s: State, now: Now, cause: str, substitute_for: str = "") -> None:
    """Admit the next query's group at the published version."""
    version = s.published
    assert version is not None
    number = s.meta.queries_drawn
    s.meta.queries_drawn += 1
    task, epoch = s.stream.query(number)
    query = QueryRow(f"q{number:06d}", Purpose.TRAIN, task.path, task.kind, epoch, number)
    group = GroupRow(f"g{number:06d}", query.query_id, version.term, version.step, s.meta.publications - 1, now.wall, substitute_for=substitute_for)
    if s.system.dispatch == "boundary" and not substitute_for:
        group.fraction, group.version_next = 0.0, version.step  # admitted at the publication itself
    s.groups[group.group_id] = group
    s.open[group.group_id] = None
    s.put(query)
    s.put(group)
    s.put(s.meta)
    for i in range(s.system.rollouts_per_group):
        _issue(s, now, f"{group.group_id}.{i}", group.group_id, query, i, version, derive_seed(s.config.run.seed, "rollout", number, i))
    s.log(
        "admitted", cause, group=group.group_id, query=query.query_id, task=query.task, task_kind=query.kind, task_epoch=epoch,
        version=version.step, term=version.term, rollouts=s.system.rollouts_per_group, substitute_for=substitute_for,
    )  # fmt: skip


def _issue(s: State, now: Now, rollout_id: str, group_id: str, query: QueryRow, i: int, version: Version, seed: int) -> None:
    s.add_rollout(
        RolloutRow(rollout_id, group_id, query.query_id, query.purpose, i, query.task, seed, version.term, version.step, s.ordinal, now.wall)
    )
    s.ordinal += 1


def on_discarded(s: State, now: Now, group: GroupRow, cause: str) -> None:
    """A group left the run: its quota is free at once. A substitute comes where `on_discard` says so, within a budget of losses in a row.

    Equal rewards are no loss and never end the run: where they do not end, the step closes without.
    """
    continuous = s.system.dispatch == "continuous"
    if group.reason == UNIFORM:
        if hopeless(s):
            return
    elif s.system.on_discard == "replace" or continuous:
        s.meta.substitutes_in_a_row += 1
        s.put(s.meta)
        if s.meta.substitutes_in_a_row > s.config.run.max_infra_failures:
            fail(s, f"{s.meta.substitutes_in_a_row} groups in a row were discarded, the last for {group.reason}", cause)
            return
    if s.system.on_discard == "replace" and not continuous and s.published is not None and s.needed > 0 and s.stream.left(s.meta.queries_drawn) != 0:
        admit_one(s, now, cause, substitute_for=group.group_id)


def hopeless(s: State) -> bool:
    """Have so many groups in a row had equal rewards that the open step is not to wait for better ones?"""
    return s.meta.uniform_in_a_row >= _UNIFORM_STEPS * s.system.groups_per_step


def fail(s: State, reason: str, cause: str = "") -> None:
    """The run cannot go on."""
    if not s.failure:
        s.failure = reason
        s.revision += 1
        s.log("failure", cause, reason=reason)


# --- evaluation ---


def evaluate(s: State, now: Now, cause: str) -> None:
    """Issue the held-out tasks of the version just published, if it is one to evaluate and was not before."""
    every, version = s.config.tasks.eval_every, s.published
    if every == 0 or not s.tasks.heldout or version is None:
        return
    period = every * s.system.steps_per_burst  # a core that resumed within a burst publishes at other steps, so passing a multiple is what counts
    before = max((e.step for e in s.evals.values() if not e.void), default=None)
    last = version.step >= s.meta.total_steps
    if before is not None and (before >= version.step or (not last and before // period == version.step // period)):
        return
    row = EvalRow(f"e{version.term}.{version.step}", version.term, version.step, len(s.tasks.heldout), now.wall, len(s.tasks.heldout))
    s.evals[row.eval_id] = row
    s.put(row)
    for i, task in enumerate(s.tasks.heldout):
        query = QueryRow(f"h{i:05d}", Purpose.EVAL, task.path, task.kind, 0, i)
        if query.query_id not in s.queries:
            s.queries[query.query_id] = query
            s.put(query)
        _issue(s, now, f"{row.eval_id}.{i}", row.eval_id, query, i, version, derive_seed(s.config.run.seed, "eval", i))
    s.log("eval_issued", cause, eval=row.eval_id, version=version.step, n=row.n)


def on_eval_settled(s: State, now: Now, row: RolloutRow, cause: str) -> None:
    """One evaluation execution is terminal; the last one completes the evaluation."""
    ev = s.evals[row.group_id]
    ev.outstanding -= 1
    s.put(ev)
    if ev.outstanding or ev.void:
        return
    ev.completed_at = now.wall
    rows = s.members[ev.eval_id]
    kinds = {r.query_id: s.queries[r.query_id].kind for r in rows}
    s.log("eval", cause, eval=ev.eval_id, version=ev.step, term=ev.term, n=len(rows), **evaluated(rows, kinds), seconds=now.wall - ev.issued_at)


def void_evals(s: State, above_step: int) -> None:
    """Evaluations of versions that a restart of the core left behind: their executions are dropped, the version will be evaluated anew."""
    for ev in s.evals.values():
        if ev.step > above_step and not ev.void:
            ev.void = True
            s.put(ev)
            for row in s.members.get(ev.eval_id, ()):
                if row.state in (RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.GRADING):
                    row.detail = "the version it was to evaluate belongs to a lineage that was left"
                    ev.outstanding -= 1
                    s.move(row, RolloutState.DISCARDED)
