"""The sandbox side of the machine: leases, endings, groups.

Invariants
- A rollout is leased to one holder at a time; a ticket issued again has a new epoch, and whatever comes under the old one is refused.
- What an ending means is `types.ENDINGS` and nothing else. A failure of the infrastructure is never a reward.
- A group is complete when all its rollouts are terminal: ready with at least `min_group` graded ones, else discarded; discarded too if their rewards
  are all equal and `train.drop_uniform` says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable

from gyre.buffer import admit
from gyre.buffer.admit import UNIFORM
from gyre.buffer.advantage import advantages, uniform
from gyre.buffer.effects import Now, Received, Store
from gyre.buffer.state import Poll, State
from gyre.types import ENDINGS, Ending, Purpose, RolloutState, Ticket, Training, Version
from gyre.wire.messages import Ack, GradingStarted, LeaseRef, LeasesRenewed, LeaseTickets, RenewLeases, RolloutEnded
from gyre.wire.rows import GroupState, Item, RolloutRow

_LEASED = (RolloutState.RUNNING, RolloutState.GRADING)


def on_lease(s: State, now: Now, e: Received, m: LeaseTickets) -> None:
    """Answer now, or become a poll. The same request again gets the same answer."""
    if (known := s.replies.get(m.id)) is not None:
        s.reply(e.to, known)
        return
    if m.id in s.lease_requests:  # answered before a restart: the answer may be lost
        tickets = [_ticket(s, s.rollouts[r]) for r in s.lease_requests[m.id]]
        s.reply(e.to, s.tickets_reply(m.id, tickets))
        return
    s.ask(now, e, m, answer_lease)


def answer_lease(s: State, now: Now, poll: Poll, m: LeaseTickets) -> bool:
    """Lease up to `n` tickets, or say that there are none: at the end of the wait, or of the run."""
    rows: list[RolloutRow] = []
    ended = s.finished or bool(s.failure)
    while not ended and len(rows) < m.n and (row := s.pop_ticket()) is not None:
        row.lease_id, row.holder, row.leased_at = m.id, poll.holder, now.wall
        s.move(row, RolloutState.RUNNING)
        s.leases[row.rollout_id] = now.mono + s.config.sandbox.lease_ttl_s
        rows.append(row)
    if not rows and not ended and m.n > 0 and now.mono < poll.deadline:
        return False
    if rows:
        s.lease_requests[m.id] = [r.rollout_id for r in rows]
        s.progress_at = now.mono
        s.log("leased", m.id, holder=poll.holder, rollouts=[r.rollout_id for r in rows])
    answer = s.tickets_reply(m.id, [_ticket(s, r) for r in rows])
    s.remember(m.id, answer)
    s.reply(poll.to, answer)
    return True


def _ticket(s: State, r: RolloutRow) -> Ticket:
    return Ticket(
        rollout_id=r.rollout_id,
        epoch=r.epoch,
        group_id=r.group_id,
        query_id=r.query_id,
        index=r.position,
        task=r.task,
        purpose=r.purpose,
        policy=Version(r.version_term, r.version_step),
        seed=r.seed,
        lease_ttl_s=s.config.sandbox.lease_ttl_s,
    )


def on_renew(s: State, now: Now, to: Hashable, m: RenewLeases) -> None:
    """Extend the leases that stand; name those that do not."""
    lost: list[LeaseRef] = []
    for ref in m.leases:
        row = s.rollouts.get(ref.rollout_id)
        if row is None or row.epoch != ref.epoch or row.state not in _LEASED:
            lost.append(ref)
        else:
            s.leases[row.rollout_id] = now.mono + s.config.sandbox.lease_ttl_s
    s.reply(to, LeasesRenewed(id="", cause=m.id, lost=lost))


def on_grading(s: State, now: Now, to: Hashable, m: GradingStarted) -> None:
    """running → grading."""
    row = s.rollouts.get(m.rollout_id)
    if row is not None and m.epoch == row.recorded:
        s.reply(to, Ack(id="", cause=m.id))
        return
    if row is None or m.epoch != row.epoch or row.state not in _LEASED:
        s.refuse(to, m, f"rollout {m.rollout_id} is not leased under epoch {m.epoch}", stale=True)
        return
    s.leases[row.rollout_id] = now.mono + s.config.sandbox.lease_ttl_s
    if row.state is RolloutState.RUNNING:
        s.move(row, RolloutState.GRADING)
    s.reply(to, Ack(id="", cause=m.id))


def on_ended(s: State, now: Now, e: Received, m: RolloutEnded) -> None:
    """An execution's outcome: recorded once per (rollout, epoch), treated by the endings table."""
    row = s.rollouts.get(m.rollout_id)
    if row is not None and m.epoch == row.recorded:
        s.reply(e.to, Ack(id="", cause=m.id))
        return
    if row is None or m.epoch != row.epoch or row.state not in _LEASED:
        s.refuse(e.to, m, f"rollout {m.rollout_id} is not leased under epoch {m.epoch}", stale=True)
        return
    ending, detail = m.ending, m.detail
    if ENDINGS[ending].grade and (m.reward is None or not math.isfinite(m.reward)):
        ending, detail = Ending.VERIFIER_FAILED, f"{m.ending} came with reward {m.reward}"
    row.recorded = m.epoch
    row.ending, row.detail, row.harness, row.harness_exit = ending, detail, m.harness, m.harness_exit
    row.ended_at, row.cells, row.n_calls = now.wall, m.cells, len(m.calls)
    row.left_tokens, row.left_leaves = m.left_tokens, m.left_leaves
    row.seconds = {k: v for k, v in m.seconds.items() if math.isfinite(v)}
    row.rewards = {k: v for k, v in m.rewards.items() if math.isfinite(v)}
    s.progress_at = now.mono
    s.reply(e.to, Ack(id="", cause=m.id))
    rule = ENDINGS[ending]
    if ending is Ending.ENGINE_LOST and (row.leased_at or 0.0) < s.engine_lost_at:
        pass  # in flight when that engine was lost: one outage is one failure, however many executions it cost
    elif rule.infrastructure:
        if ending is Ending.ENGINE_LOST:
            s.engine_lost_at = now.wall
        count_infrastructure(s, ending, detail, row.holder, m.id)
    else:
        s.infra_in_a_row = 0
    match rule.training:
        case Training.RETRY:
            retry(s, now, row, m.id)
            return
        case Training.DISCARD:
            settle(s, now, row, RolloutState.DISCARDED, m.id)
            return
        case Training.PLACEHOLDER:
            row.reward = 0.0
        case Training.ACCEPT | Training.STATISTICS:
            row.reward = m.reward
            if rule.training is Training.ACCEPT:
                row.items = _items(m)
            if e.versions is not None:
                row.version_min, row.version_max = e.versions
    s.emit(Store(row))
    settle(s, now, row, RolloutState.WAITING, m.id)


def _items(m: RolloutEnded) -> list[Item]:
    """What is there to pack: the trajectories that bear loss count each of the graph's nodes once."""
    seen: set[int] = set()
    items = []
    for t in m.trajectories:
        own = sum(m.nodes[i].n_tokens for i in t.nodes if i not in seen) if t.n_trainable and t.nodes else -1
        items.append(Item(m.rollout_id, t.index, t.n_tokens, t.n_trainable, t.leaf_class.value, own))
        seen.update(t.nodes if t.n_trainable else ())
    return items


def count_infrastructure(s: State, ending: Ending, detail: str, where: str, cause: str) -> None:
    """One more failure of the infrastructure with no success between; too many end the run."""
    s.infra_in_a_row += 1
    if s.infra_in_a_row >= s.config.run.max_infra_failures:
        last = f"{ending} at {where or 'an unknown sandbox'}" + (f": {detail}" if detail else "")
        admit.fail(s, f"{s.infra_in_a_row} infrastructure failures in a row, the last: {last}", cause)


def retry(s: State, now: Now, row: RolloutRow, cause: str) -> None:
    """Issue the ticket again under a new epoch, or discard the execution when the budget is used up."""
    if row.reissues >= s.config.sandbox.reissues:
        settle(s, now, row, RolloutState.DISCARDED, cause)
        return
    row.reissues += 1
    row.epoch += 1
    s.move(row, RolloutState.QUEUED)
    s.push_ticket(row)
    s.log("reissued", cause, rollout=row.rollout_id, epoch=row.epoch, ending=row.ending, detail=row.detail, holder=row.holder)


def expire_leases(s: State, now: Now) -> None:
    """Leases that ran out. However many a dead holder had, it counts as one failure of the infrastructure."""
    if not s.leases or min(s.leases.values()) > now.mono:
        return
    holders: set[str] = set()
    for rollout_id in [r for r, deadline in s.leases.items() if deadline <= now.mono]:
        row = s.rollouts[rollout_id]
        row.ending, row.detail, row.ended_at = Ending.SANDBOX_LOST, "its lease expired", now.wall
        s.log("lease_lost", row.lease_id, rollout=rollout_id, epoch=row.epoch, holder=row.holder)
        if row.holder not in holders:
            holders.add(row.holder)
            count_infrastructure(s, Ending.SANDBOX_LOST, "its lease expired", row.holder, row.lease_id)
        retry(s, now, row, row.lease_id)


def settle(s: State, now: Now, row: RolloutRow, state: RolloutState, cause: str) -> None:
    """An execution is terminal."""
    evaluation = row.purpose is Purpose.EVAL
    s.move(row, RolloutState.CONSUMED if evaluation and state is RolloutState.WAITING else state)
    s.log(
        "rollout_ended", cause, rollout=row.rollout_id, group=row.group_id, purpose=row.purpose, epoch=row.epoch, ending=row.ending,
        state=row.state, reward=row.reward, detail=row.detail, holder=row.holder, n_calls=row.n_calls,
        n_tokens=sum(i.n_tokens for i in row.items), n_trainable=sum(i.n_trainable for i in row.items),
        leased_at=row.leased_at, seconds=row.seconds,
    )  # fmt: skip
    if evaluation:
        admit.on_eval_settled(s, now, row, cause)
    else:
        _complete(s, now, row.group_id, cause)


def _complete(s: State, now: Now, group_id: str, cause: str) -> None:
    """If all rollouts of the group are terminal, it is ready or discarded."""
    group, rows = s.groups[group_id], s.members[group_id]
    if any(r.state not in (RolloutState.WAITING, RolloutState.DISCARDED) for r in rows):
        return
    graded = sorted((r for r in rows if r.state is RolloutState.WAITING), key=lambda r: r.position)
    rewards = [r.reward or 0.0 for r in graded]
    group.graded = len(graded)
    if len(graded) < s.system.min_group:
        reasons = Counter(str(r.ending) for r in rows if r.state is RolloutState.DISCARDED)
        discard_group(s, now, group_id, max(sorted(reasons), key=lambda k: reasons[k]), cause)
        return
    group.reward_mean = math.fsum(rewards) / len(rewards)
    group.uniform = uniform(rewards)
    s.meta.substitutes_in_a_row = 0
    if group.uniform and s.config.train.drop_uniform:
        s.meta.uniform_in_a_row += 1
        discard_group(s, now, group_id, UNIFORM, cause)
        return
    for row, advantage in zip(graded, advantages(rewards, s.config.train.advantage), strict=True):
        row.advantage = advantage
    group.ready_seq, group.ready_at = rows[0].ordinal if s.config.run.deterministic else s.meta.ready_seq, now.wall
    s.meta.ready_seq += 1
    s.meta.uniform_in_a_row = 0
    s.put(s.meta)
    s.move_group(group, GroupState.READY)
    s.log("group_ready", cause, group=group_id, graded=len(graded), discarded=len(rows) - len(graded), reward_mean=group.reward_mean,
          uniform=group.uniform)  # fmt: skip


def discard_group(s: State, now: Now, group_id: str, reason: str, cause: str) -> None:
    """A group leaves the run, with all its rollouts."""
    group = s.groups[group_id]
    group.reason = reason
    s.move_group(group, GroupState.DISCARDED)
    s.meta.discards[reason] = s.meta.discards.get(reason, 0) + 1
    s.put(s.meta)
    s.log("group_discarded", cause, group=group_id, reason=reason, graded=group.graded)
    if reason != RUN_ENDED:
        admit.on_discarded(s, now, group, cause)


RUN_ENDED = "run_ended"
"""Why groups are discarded that no step needs any more."""
