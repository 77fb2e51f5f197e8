"""`run.deterministic`: whatever is lost on the way, each step trains the same trajectories in the same micro-steps."""

from __future__ import annotations

import pytest

from gyre.errors import UsageError
from gyre.types import RolloutState
from gyre.wire.rows import GroupRow, MicroStepRow, RolloutRow, StepRow, StepState


def consumed(wd):
    """What each step of the surviving lineage trained: its groups in order, each execution's reward and advantage, its micro-steps."""
    rows = wd.stored()
    steps = {r.step: r for r in rows if isinstance(r, StepRow) and r.state is StepState.COMMITTED}
    rollouts = {r.rollout_id: r for r in rows if isinstance(r, RolloutRow) and r.state is RolloutState.CONSUMED}
    groups = {r.group_id: r for r in rows if isinstance(r, GroupRow)}
    packs = {}
    for r in rows:
        if isinstance(r, MicroStepRow) and r.step in steps and r.term == steps[r.step].term:
            packs.setdefault(r.step, []).append((r.number, [(i.rollout_id, i.index, i.n_tokens) for i in r.items]))
    return {
        n: (
            s.groups,
            [groups[g].version_step for g in s.groups],
            sorted((r.rollout_id, r.reward, r.advantage) for r in rollouts.values() if r.group_id in s.groups),
            sorted(packs.get(n, [])),
        )
        for n, s in steps.items()
    }


@pytest.mark.pain(24)
@pytest.mark.parametrize("seed", range(40))
def test_a_run_in_which_things_are_lost_trains_what_one_trains_in_which_nothing_is(run_deterministic, seed):
    whole = run_deterministic(seed, order=seed, faults=False)
    assert whole.machine.finished
    trained = consumed(whole)
    assert sorted(trained) == list(range(1, len(trained) + 1)) and any(packs for *_, packs in trained.values())
    for n in range(3):
        torn = run_deterministic(seed, order=1000 * seed + n, faults=True)
        assert torn.machine.finished, torn.machine.failure
        assert consumed(torn) == trained


@pytest.mark.pain(24)
def test_what_ran_at_a_version_that_was_lost_begins_anew_when_it_is_there_again(world):
    wd = world(run__deterministic=True, system__groups_per_step=1, system__rollouts_per_group=2, system__target_staleness=0.0, train__steps=3)
    wd.core()
    wd.publish(0)
    wd.finish_all()
    wd.train(1)
    wd.publish(1)
    (a,) = wd.lease()
    wd.core()  # no checkpoint of step 1
    assert wd.lease() == [], "version 1 is not there"
    assert wd.end(a).stale
    wd.publish(0)
    assert wd.lease() == []
    wd.restart()
    wd.train(1)
    wd.publish(1)
    again = wd.lease(5)
    assert [(t.rollout_id, t.epoch, t.policy.term, t.policy.step) for t in again] == [("g000001.0", 1, 2, 1), ("g000001.1", 0, 2, 1)]
    assert again[0].seed == a.seed


@pytest.mark.parametrize("key", [{"system__target_staleness": 1.0}, {"system__steps_per_burst": 2, "system__target_staleness": 0.5}])
def test_what_depends_on_the_moment_of_a_publication_is_refused(world, key):
    with pytest.raises(UsageError, match=r"run\.deterministic"):
        world(run__deterministic=True, **{"system__target_staleness": 0.0, **key})
