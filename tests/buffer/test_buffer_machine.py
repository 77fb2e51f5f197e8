"""The buffer's machine: literal inputs and what comes out."""

from __future__ import annotations

import msgspec
import pytest

from gyre.buffer import state
from gyre.errors import UsageError
from gyre.types import ENDINGS, Ending, GraphNode, LeafClass, Purpose, RolloutState, Training, TrajectoryMeta, Version
from gyre.wire import messages as w
from gyre.wire.rows import GroupState

GRADED = [e for e, rule in ENDINGS.items() if rule.grade]


def start(make, **keys):
    """A world whose core has published version 0. phi = 0 unless said otherwise."""
    defaults = {"system__groups_per_step": 2, "system__rollouts_per_group": 2, "system__target_staleness": 0.0, "train__steps": 3}
    wd = make(**{**defaults, **keys})
    wd.core()
    assert isinstance(wd.publish(0), w.Ack)
    return wd


# --- tickets and leases ---


def test_nothing_is_admitted_before_the_first_publication(world):
    wd = world(system__groups_per_step=2, system__rollouts_per_group=2)
    assert wd.lease() == []
    wd.core()
    assert wd.lease() == []
    wd.publish(0)
    assert wd.machine.counters().admitted == 8  # Q = (phi + mu)·B = 4 groups
    assert [t.rollout_id for t in wd.lease(3)] == ["g000000.0", "g000000.1", "g000001.0"]


def test_a_poll_is_answered_when_a_ticket_comes_and_the_same_request_has_one_answer(world):
    wd = world(system__groups_per_step=1, system__rollouts_per_group=1)
    request = w.LeaseTickets(id="L", n=1, wait_s=10.0)
    assert wd.send(request) == []
    assert wd.send(request, to="again") == []
    wd.core()
    published = wd.send(w.Published(id="p", version=Version(1, 0), cells=[], seconds=0.0))
    (answer,) = [(to, m) for to, m in published if m.cause == "L"]
    assert answer[0] == "again" and len(answer[1].tickets) == 1
    assert wd.send(request) == [("peer", answer[1])]
    wd.restart()
    assert wd.one(request) == answer[1]  # the answer may have been lost with the buffer


def test_a_poll_ends_empty_after_its_wait(world):
    wd = world()
    assert wd.send(w.LeaseTickets(id="L", n=1, wait_s=10.0)) == []
    assert wd.machine.next_deadline() == 110.0
    assert wd.tick(9.0) == []
    assert wd.tick(1.0) == [("peer", w.Tickets(id="", cause="L", tickets=[]))]


def test_polls_are_bounded(world, monkeypatch):
    """Somebody who asks and asks and never waits for an answer; who comes after so many is answered at once."""
    monkeypatch.setattr(state, "_POLLS_KEPT", 3)
    wd = world()
    for n in range(3):
        assert wd.send(w.LeaseTickets(id=f"L{n}", n=1, wait_s=10.0)) == []
    assert wd.lease(wait_s=10.0) == []
    assert wd.machine.next_deadline() == 110.0


@pytest.mark.pain(3)
def test_a_lost_lease_is_issued_again_under_a_new_epoch_and_the_old_one_is_refused(world):
    wd = start(world, sandbox__lease_ttl_s=30.0)
    (old,) = wd.lease()
    wd.tick(29.0)
    ref = w.LeaseRef(old.rollout_id, 0)
    assert wd.one(w.RenewLeases(id="r", leases=[ref])).lost == []
    wd.tick(29.0)
    assert wd.machine.counters().states["running"] == 1
    wd.tick(2.0)
    assert wd.machine.counters().states["running"] == 0
    assert wd.one(w.RenewLeases(id="r2", leases=[ref])).lost == [ref]
    (new,) = wd.lease()
    assert (new.rollout_id, new.epoch, new.seed) == (old.rollout_id, 1, old.seed)
    assert wd.end(old) == w.Refuse(id="", cause="m4", reason="rollout g000000.0 is not leased under epoch 0", stale=True)
    assert wd.one(w.GradingStarted(id="g", rollout_id=old.rollout_id, epoch=0)).stale
    assert isinstance(wd.end(new), w.Ack)


def test_a_restart_arms_leases_and_claims_anew_whatever_the_clocks_say_now(world):
    """After a reboot monotonic time begins again, and the wall clock may be anything: a lease's holder has all its time to be heard of, no more."""
    wd = start(
        world, sandbox__lease_ttl_s=30.0, train__claim_ttl_s=30.0, system__groups_per_step=2, system__rollouts_per_group=1,
        system__target_staleness=2.0,
    )  # fmt: skip
    for ticket in wd.lease(2):
        wd.end(ticket)
    assert isinstance(wd.claim(1), w.MicroStepClaimed)
    (held,) = wd.lease()
    wd.tick(29.0)
    wd.now, wd.wall = 3.0, 0.0
    wd.restart()
    wd.tick(29.0)
    assert wd.machine.counters().states["running"] == 1 and "voided" not in wd.kinds()
    assert wd.one(w.RenewLeases(id="r", leases=[w.LeaseRef(held.rollout_id, 0)])).lost == []
    wd.tick(2.0)
    assert "voided" in wd.kinds() and "lease_lost" not in wd.kinds()
    wd.tick(29.0)
    assert wd.events("lease_lost")[0]["rollout"] == held.rollout_id


@pytest.mark.pain(8)
def test_losses_beyond_the_budget_discard_the_execution_and_keep_its_siblings(world):
    wd = start(world, sandbox__reissues=2, system__groups_per_step=1, system__rollouts_per_group=4)
    others = wd.lease(4)[1:]
    for t in others:
        wd.end(t, 1.0)
    for _ in range(2):
        wd.tick(31.0)
        wd.lease()
    wd.tick(31.0)
    row = wd.machine.state.rollouts["g000000.0"]
    assert (row.state, row.ending) == (RolloutState.DISCARDED, Ending.SANDBOX_LOST)
    assert wd.machine.counters().states == {**dict.fromkeys(wd.machine.counters().states, 0), "ready": 3, "discarded": 1}


@pytest.mark.pain(3)
def test_three_rollouts_lost_silently_out_of_128_do_not_stop_the_step(world):
    wd = start(world, n_tasks=16, system__groups_per_step=16, system__rollouts_per_group=8)
    leased = wd.lease(128)
    for t in leased[3:]:
        wd.end(t)
    assert wd.machine.counters().states["running"] == 3
    wd.tick(31.0)
    assert wd.finish_all() == 3
    assert wd.train(1).stats.executions == 128


def test_an_end_sent_twice_is_acknowledged_twice_and_recorded_once(world):
    wd = start(world)
    (ticket,) = wd.lease()
    for _ in range(3):
        assert isinstance(wd.end(ticket), w.Ack)
    assert len(wd.events("rollout_ended")) == 1
    wd.restart()
    assert isinstance(wd.end(ticket), w.Ack)


def test_grading_is_a_state_of_its_own(world):
    wd = start(world)
    (ticket,) = wd.lease()
    assert isinstance(wd.one(w.GradingStarted(id="g", rollout_id=ticket.rollout_id, epoch=0)), w.Ack)
    counters = wd.machine.counters()
    assert (counters.states["grading"], counters.water_level) == (1, 4)
    wd.end(ticket)
    assert wd.machine.counters().water_level == 3


# --- endings and groups ---


@pytest.mark.pain(19, 20)
@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_has_the_consequence_of_its_row(world, ending):
    wd = start(world, system__groups_per_step=1, sandbox__reissues=0)
    first, second = wd.lease(2)
    rule = ENDINGS[ending]
    wd.end(first, 0.5 if rule.grade else None, ending)
    wd.end(second, 1.0)
    rows = wd.machine.state.rollouts
    row, sibling = rows[first.rollout_id], rows[second.rollout_id]
    assert row.ending is ending
    if rule.training in (Training.DISCARD, Training.RETRY):
        assert (row.state, row.advantage, row.reward) == (RolloutState.DISCARDED, None, None)
        assert sibling.advantage == 0.0  # the failed one is outside the mean
    else:
        reward = 0.0 if rule.training is Training.PLACEHOLDER else 0.5
        assert (row.state, row.reward) == (RolloutState.READY, reward)
        assert (row.advantage, sibling.advantage) == ((reward - 1) / 2, (1 - reward) / 2)
        assert bool(row.items) is (rule.training is Training.ACCEPT)


@pytest.mark.pain(19)
@pytest.mark.parametrize("ending", GRADED)
@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_grade_without_a_number_is_a_verifier_failure_never_zero(world, ending, reward):
    wd = start(world, sandbox__reissues=1)
    (ticket,) = wd.lease()
    wd.end(ticket, reward, ending)
    row = wd.machine.state.rollouts[ticket.rollout_id]
    assert (row.state, row.ending, row.reward, row.epoch) == (RolloutState.DISCARDED, Ending.VERIFIER_FAILED, None, 0)


@pytest.mark.pain(15)
def test_an_execution_weighs_once_however_many_trajectories_it_has(world):
    wd = start(world, system__groups_per_step=1)
    a, b = wd.lease(2)
    wd.end(a, 1.0, sizes=((5, 2), (6, 3), (7, 4)))
    wd.end(b, 0.0)
    got = wd.claim(1)
    assert [t.advantage for t in got.trajectories] == [0.5, 0.5, 0.5, -0.5]
    assert [t.execution_trainable for t in got.trajectories] == [9, 9, 9, 4]


@pytest.mark.pain(15, 20)
def test_groups_of_uneven_size_have_their_own_baseline(world):
    wd = start(world, system__groups_per_step=3, system__rollouts_per_group=4)
    rewards = {"g000000": [1, 0, 1, 0], "g000001": [5, 5, 5, None], "g000002": [0, 0, 0, 4]}
    for t in wd.lease(12):
        r = rewards[t.group_id][t.index]
        wd.end(t, None if r is None else float(r), Ending.OVERALL_TIMEOUT if r is None else Ending.FINISHED)
    s = wd.machine.state
    assert {g: [m.advantage for m in s.members[g]] for g in rewards} == {
        "g000000": [0.5, -0.5, 0.5, -0.5],
        "g000001": [0.0, 0.0, 0.0, None],
        "g000002": [-1.0, -1.0, -1.0, 3.0],
    }
    stats = wd.train(1).stats
    assert (stats.executions, stats.uniform_groups, stats.reward_mean) == (11, 1, 21 / 11)


@pytest.mark.pain(16)
def test_two_epochs_of_a_task_are_two_groups(world):
    wd = start(world, n_tasks=1, system__groups_per_step=2, train__steps=1)
    leased = wd.lease(8)
    assert {t.task for t in leased} == {"/t/0"}
    assert {t.group_id: t.query_id for t in leased} == {"g000000": "q000000", "g000001": "q000001"}
    assert len({t.seed for t in leased}) == 4
    for t in leased:
        wd.end(t, float(t.group_id == "g000000"))
    assert [r.advantage for r in wd.machine.state.rollouts.values()] == [0.0] * 4


@pytest.mark.pain(8)
def test_a_group_with_too_few_graded_is_discarded(world):
    wd = start(world, system__min_group=2, sandbox__reissues=0)
    a, b, *_ = wd.lease(4)
    wd.end(a, 1.0)
    wd.end(b, None, Ending.SANDBOX_LOST)
    group = wd.machine.state.groups["g000000"]
    assert (group.state, group.reason) == (GroupState.DISCARDED, "sandbox_lost")
    assert wd.machine.counters().states["discarded"] == 2


def test_min_group_above_the_group_is_refused(world):
    with pytest.raises(UsageError, match=r"system\.min_group.*at most system\.rollouts_per_group"):
        world(system__min_group=9, system__rollouts_per_group=8)


# --- failures of the infrastructure ---


def test_infrastructure_failures_in_a_row_fail_the_run_and_a_success_between_resets(world):
    wd = start(world, run__max_infra_failures=3, sandbox__reissues=9)
    for _ in range(2):
        wd.end(wd.lease()[0], None, Ending.ENGINE_LOST)
    wd.end(wd.lease()[0], 1.0)
    for _ in range(2):
        wd.end(wd.lease()[0], None, Ending.VERIFIER_FAILED)
    assert wd.machine.failure == ""
    wd.end(wd.lease()[0], None, Ending.INFRA_SETUP_FAILED)
    assert wd.machine.failure == "3 infrastructure failures in a row, the last: infra_setup_failed at sb/1"
    assert wd.machine.counters().failure == wd.machine.failure
    assert wd.one(w.LeaseTickets(id="L", n=1, wait_s=9.0)).finished
    assert wd.machine.failure in wd.claim(1).reason


def test_an_engine_lost_counts_once_however_many_executions_it_had(world):
    wd = start(world, run__max_infra_failures=3, sandbox__reissues=9, system__groups_per_step=8)
    for failures in range(3):  # waves of executions
        assert wd.machine.failure == "", failures
        tickets = wd.lease(10)
        wd.now += 1.0
        for ticket in tickets:
            wd.end(ticket, None, Ending.ENGINE_LOST)
    assert wd.machine.failure.startswith("3 infrastructure failures in a row, the last: engine_lost")


def test_a_ledger_goes_on_with_its_own_seed(world):
    wd = start(world)
    wd.cfg = msgspec.structs.replace(wd.cfg, run=msgspec.structs.replace(wd.cfg.run, seed=wd.cfg.run.seed + 1))
    with pytest.raises(UsageError, match=r"run.seed: the ledger was begun with seed 0, not 1; give that seed"):
        wd.restart()


def test_a_dead_sandbox_counts_once_however_many_leases_it_had(world):
    wd = start(world, run__max_infra_failures=3, system__groups_per_step=8)
    wd.lease(10, holder="sb/1")
    wd.tick(31.0)
    assert (wd.machine.failure, len(wd.events("lease_lost"))) == ("", 10)


# --- discards and bursts ---


def discard(wd, ticket):
    wd.end(ticket, None, Ending.OVERALL_TIMEOUT)


def test_at_phi_zero_a_discarded_group_shrinks_the_step(world):
    wd = start(world, system__groups_per_step=3, system__rollouts_per_group=1)
    a, b, c = wd.lease(3)
    wd.end(a)
    discard(wd, b)
    assert isinstance(wd.claim(1), w.NothingToClaim)
    wd.end(c)
    manifest = wd.train(1)
    assert (manifest.stats.groups, manifest.stats.discarded_groups) == (2, 1)
    assert wd.events("step_closed")[0] == {"step": 1, "groups": 2, "short": 1, "discarded_by_reason": {"overall_timeout": 1}}
    wd.publish(1)
    assert wd.machine.counters().groups_open == 3


def test_only_the_last_step_of_the_burst_shrinks(world):
    wd = start(world, system__steps_per_burst=3, system__target_staleness=1.0, system__rollouts_per_group=1, train__steps=6)
    leased = wd.lease(9)
    assert len(leased) == 6
    discard(wd, leased[0])
    for t in leased[1:]:
        wd.end(t)
    assert [wd.train(step).stats.groups for step in (1, 2, 3)] == [2, 2, 1]
    answer = wd.claim(4)
    assert not answer.drained and answer.waiting_for == "step 4 has 0 of 2 groups; a publication of version 3 is due"


@pytest.mark.pain(23)
def test_a_step_that_lost_all_its_groups_is_closed_empty_and_the_run_goes_on(world):
    wd = start(world, system__rollouts_per_group=1)
    for t in wd.lease(2):
        discard(wd, t)
    manifest = wd.train(1)
    assert (manifest.entries, manifest.stats.groups, manifest.stats.reward_mean) == ([], 0, None)
    assert wd.events("step")[0]["groups_discarded"] == {"overall_timeout": 2}
    wd.publish(1)
    wd.finish_all()
    assert wd.train(2).stats.groups == 2


def test_with_replace_a_substitute_is_admitted_at_the_published_version(world):
    wd = start(world, system__on_discard="replace", system__rollouts_per_group=1)
    a, b = wd.lease(2)
    discard(wd, a)
    wd.end(b)
    (c,) = wd.lease(2)
    assert (c.group_id, c.policy) == ("g000002", Version(1, 0))
    assert wd.events("admitted")[-1]["substitute_for"] == "g000000"
    wd.end(c)
    assert wd.train(1).stats.groups == 2


@pytest.mark.pain(9)
def test_endless_substitution_ends_the_run(world):
    wd = start(world, system__on_discard="replace", system__rollouts_per_group=1, run__max_infra_failures=5)
    while leased := wd.lease(1):
        discard(wd, leased[0])
    assert wd.machine.failure == "6 groups in a row were discarded, the last for overall_timeout"


@pytest.mark.pain(17)
def test_trajectories_of_an_execution_are_packed_as_their_tree(world):
    """Nodes of 50, 20, 30 and 40 tokens: paths 0-1, 0-2 and 0-2-3 are 270 tokens as rows and 140 as a tree, which fit into 150 together."""
    wd = start(world, system__rollouts_per_group=1, train__micro_step_tokens=150)
    nodes = [GraphNode(-1, 50), GraphNode(0, 20, "a"), GraphNode(0, 30, "b"), GraphNode(2, 40, "c")]
    paths = [([0, 1], [1], 70, 20), ([0, 2], [2], 80, 30), ([0, 2, 3], [3], 120, 40)]
    for t in wd.lease(2):
        metas = [TrajectoryMeta(i, LeafClass.MAIN, *path) for i, path in enumerate(paths)]
        wd.one(
            w.RolloutEnded(id=wd.id(), rollout_id=t.rollout_id, epoch=t.epoch, ending=Ending.FINISHED, reward=1.0, nodes=nodes, trajectories=metas)
        )
    assert [i.n_own for i in wd.machine.state.rollouts["g000000.0"].items] == [70, 30, 40]
    assert [len(wd.claim(1).trajectories) for _ in range(2)] == [3, 3]
    rows = start(world, system__rollouts_per_group=1, train__micro_step_tokens=150, train__prefix_tree=False)
    for t in rows.lease(2):
        rows.end(t, sizes=((70, 20), (80, 30), (120, 40)))
    assert [len(rows.claim(1).trajectories) for _ in range(4)] == [2, 1, 2, 1]


def test_groups_of_equal_rewards_are_dropped_like_a_discard(world):
    wd = start(world, train__drop_uniform=True)
    tickets = wd.lease(4)
    for t, reward in zip(tickets, [1.0, 1.0, 1.0, 0.0], strict=True):
        wd.end(t, reward)
    manifest = wd.train(1)
    assert (manifest.stats.groups, manifest.stats.executions, manifest.stats.discarded_groups) == (1, 2, 1)
    assert wd.events("step_closed")[0]["discarded_by_reason"] == {"uniform_rewards": 1}
    (dropped,) = [g for g in wd.machine.state.groups.values() if g.state == "discarded"]
    assert (dropped.reason, dropped.uniform, dropped.reward_mean) == ("uniform_rewards", True, 1.0)


@pytest.mark.pain(23)
@pytest.mark.parametrize("dispatch", ["boundary", "continuous"])
@pytest.mark.parametrize("on_discard", ["shrink", "replace"])
@pytest.mark.parametrize("epochs", [0, 2])
def test_equal_rewards_for_ever_stall_no_burst_and_end_no_run(world, dispatch, on_discard, epochs):
    wd = start(
        world, system__dispatch=dispatch, system__on_discard=on_discard, system__steps_per_burst=2, system__target_staleness=2.0,
        train__drop_uniform=True, train__steps=6, tasks__epochs=epochs, run__max_infra_failures=3,
    )  # fmt: skip
    last = wd.machine.counters().total_steps
    for step in range(1, last + 1):
        for _ in range(100):
            got = wd.claim(step)
            if isinstance(got, w.NothingToClaim) and got.drained:
                break
            for t in wd.lease(1):
                wd.end(t, 1.0)
        else:
            raise AssertionError(f"step {step} stalls: {wd.machine.waits(wd.clock())}")
        wd.commit(step, wd.seal(step).hash)
        if step % 2 == 0 or step == last:
            wd.publish(step)
    assert wd.machine.finished and not wd.machine.failure
    assert wd.events("group_discarded")[0]["reason"] == "uniform_rewards"


@pytest.mark.pain(30)
@pytest.mark.parametrize("mu", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 3, 5])
@pytest.mark.parametrize("dispatch", ["boundary", "continuous"])
def test_sizes_that_do_not_divide(world, mu, b, dispatch):
    wd = start(
        world, n_tasks=7, system__groups_per_step=b, system__steps_per_burst=mu, system__dispatch=dispatch, train__steps=7,
        system__target_staleness=(mu - 1) / 2 + 1.3, train__micro_step_tokens=25,
    )  # fmt: skip
    for step in range(1, 8):
        while not isinstance(got := wd.claim(step), w.NothingToClaim) or not got.drained:
            if isinstance(got, w.MicroStepClaimed):
                wd.accumulate(got.micro_step_id, step)
            else:
                assert wd.finish_all(), got
        assert wd.commit(step, wd.seal(step).hash) is not None
        if step % mu == 0 or step == 7:
            assert isinstance(wd.publish(step), w.Ack)
    assert wd.machine.finished
    assert [s.manifest["stats"]["groups"] for s in wd.machine.state.steps.values()] == [b] * 7
    assert wd.machine.counters().admitted == 7 * b * 2


@pytest.mark.pain(23)
def test_a_step_without_a_trainable_token_commits_and_names_why(world):
    wd = start(world)
    for t, ending in zip(wd.lease(4), [Ending.NO_TRAINABLE_TOKEN, Ending.TASK_SETUP_FAILED, Ending.FINISHED, Ending.FINISHED], strict=True):
        wd.end(t, None if ending is Ending.TASK_SETUP_FAILED else 1.0, ending, sizes=((5, 0),))
    manifest = wd.train(1)
    assert (manifest.entries, manifest.stats.executions, manifest.stats.trainable_tokens) == ([], 4, 0)
    assert wd.events("step")[0]["executions_without_trainable"] == {"finished": 2, "no_trainable_token": 1, "task_setup_failed": 1}


def test_epochs_that_run_out_end_the_run_early(world):
    wd = start(world, n_tasks=3, tasks__epochs=1, train__steps=10)
    assert wd.machine.counters().total_steps == 2
    wd.finish_all()
    assert wd.train(1).stats.groups == 2
    wd.publish(1)
    wd.finish_all()
    assert wd.train(2).stats.groups == 1
    wd.publish(2)
    assert wd.machine.finished
    assert wd.one(w.LeaseTickets(id="L", n=1, wait_s=9.0)).finished
    assert wd.claim(3).reason == "the run ends at step 2"


# --- the training side ---


def test_packing_waits_for_a_full_micro_step_or_the_end_of_the_step(world):
    wd = start(world, system__groups_per_step=3, system__rollouts_per_group=1, train__micro_step_tokens=20)
    a, b, c = wd.lease(3)
    wd.end(a, sizes=((10, 4),))
    assert wd.claim(1) == w.NothingToClaim(
        id="", cause="m4", drained=False, waiting_for="step 1 has 1 of 3 groups; 2 groups are out: 2 rollouts running, 0 tickets without a sandbox"
    )
    wd.end(b, sizes=((10, 4),))
    got = wd.claim(1)
    assert (got.micro_step_id, [t.rollout_id for t in got.trajectories]) == ("s1.t1.m0", ["g000000.0", "g000001.0"])
    assert wd.machine.counters().states["claimed"] == 2
    wd.end(c, sizes=((25, 4),))
    last = wd.claim(1)
    assert [t.n_tokens for t in last.trajectories] == [25]
    for micro in (got, last):
        wd.accumulate(micro.micro_step_id, 1)
    assert wd.claim(1).drained


def test_a_claim_waits_for_a_group_and_sent_again_gets_the_same_micro_step(world):
    wd = start(world, system__groups_per_step=1, system__rollouts_per_group=1)
    claim = w.ClaimMicroStep(id="C", term=1, step=1, cell="core", incarnation="i1", wait_s=9.0)
    assert wd.send(claim) == []
    (t,) = wd.lease()
    m = [m for _, m in wd.send(w.RolloutEnded(id="E", rollout_id=t.rollout_id, epoch=0, ending=Ending.FINISHED, reward=1.0))]
    assert [type(x) for x in m] == [w.Ack, w.NothingToClaim]  # it had no trajectory
    wd.commit(1, wd.seal(1).hash)
    wd.publish(1)
    assert wd.send(again := w.ClaimMicroStep(id="D", term=1, step=2, cell="core", incarnation="i1", wait_s=9.0)) == []
    wd.end(wd.lease()[0])
    wd.restart()
    assert wd.one(again).micro_step_id == "s2.t1.m0"


def test_renewal_keeps_the_claims(world):
    wd = start(world, system__rollouts_per_group=1, train__claim_ttl_s=60.0)
    wd.finish_all()
    got = wd.claim(1)
    for _ in range(5):
        wd.tick(50.0)
        assert isinstance(wd.one(w.RenewClaims(id=wd.id(), term=1, cell="core", incarnation="i1")), w.Ack)
    assert isinstance(wd.accumulate(got.micro_step_id, 1), w.Ack)


def test_a_seal_waits_for_outstanding_claims_and_names_them(world):
    wd = start(world, system__rollouts_per_group=1)
    wd.finish_all()
    got = wd.claim(1)
    assert wd.seal(1).waiting_for == "claims of core/i1"
    seal = w.SealStep(id="S", term=1, step=1, wait_s=5.0)
    assert wd.send(seal) == []
    replies = wd.send(w.Accumulated(id="A", term=1, step=1, micro_step_id=got.micro_step_id, cell="core", incarnation="i1"))
    assert [type(m) for _, m in replies] == [w.Ack, w.Manifest]
    first = replies[1][1]
    wd.restart()
    assert wd.seal(1).hash == first.hash


def test_a_commit_is_idempotent_and_needs_the_manifest(world):
    wd = start(world, system__rollouts_per_group=1)
    wd.finish_all()
    assert wd.commit(1, "x").stale
    manifest = wd.train(1)
    for _ in range(2):
        assert isinstance(wd.commit(1, manifest.hash), w.Ack)
        wd.restart()
    assert isinstance(wd.commit(1, "other"), w.Refuse)
    assert len(wd.events("step")) == 1
    assert wd.events("step")[0]["metrics"] == {"loss": 0.5, "bad": None}


def test_the_manifest_is_the_same_for_the_same_history(world):
    hashes = []
    for _ in range(2):
        wd = start(world)
        wd.finish_all()
        hashes.append(wd.train(1).hash)
    assert hashes[0] == hashes[1]


@pytest.mark.pain(24, 25)
def test_a_core_that_starts_from_an_older_checkpoint_replays_the_same_groups(world):
    wd = start(world, train__steps=6)
    seen = {}
    for step in range(1, 5):
        wd.finish_all()
        wd.train(step)
        wd.publish(step)
        seen[step] = wd.machine.state.steps[step].groups
    admitted = wd.machine.counters().admitted
    granted = wd.core(2)
    assert (granted.term, granted.step, granted.total_steps) == (2, 2, 6)
    assert wd.machine.counters().states["ready"] == 8
    wd.publish(2)
    assert wd.machine.counters().admitted == admitted  # no burst of admissions
    wd.restart()
    for step in (3, 4):
        wd.train(step, incarnation="i2")
        assert wd.machine.state.steps[step].groups == seen[step]
        wd.publish(step)
    assert wd.core(9 - 4 - 1).step == 4
    assert isinstance(wd.one(w.AcquireTerm(id="a", cell="core", step=5)), w.Refuse)


def test_a_checkpoint_of_a_lineage_that_was_left_is_refused_as_stale(world):
    wd = start(world, train__steps=6)

    def acquire(step, term):
        return wd.one(w.AcquireTerm(id=wd.id(), cell="core", step=step, checkpoint_term=term))

    def train(step):
        wd.finish_all()
        wd.train(step, incarnation=f"i{wd.machine.state.meta.term}")
        wd.publish(step)

    train(1)
    train(2)
    assert acquire(1, 1).term == 2  # a core that was stopped after step 2 of term 1 is replaced, wakes and writes its checkpoint of step 2
    late = acquire(2, 1)
    assert isinstance(late, w.Refuse) and late.stale, "not committed in this lineage"
    wd.publish(1)
    train(2)
    late = acquire(2, 1)
    assert isinstance(late, w.Refuse) and late.stale, "committed again since, under another term"
    assert acquire(1, 1).term == 3, "an older one, of before, will do"
    wd.publish(1)
    train(2)
    assert acquire(2, 3).term == 4
    assert acquire(2, 3).term == 5, "nothing was done since"
    ahead = acquire(5, 9)
    assert isinstance(ahead, w.Refuse) and not ahead.stale, "of another ledger"


def test_staleness_of_a_publication_offered_and_trained(world):
    wd = start(world, system__target_staleness=1.0, system__rollouts_per_group=1)
    wd.finish_all()  # four groups of version 0
    wd.train(1)
    wd.publish(1)
    wd.finish_all()
    wd.train(2)
    wd.publish(2)
    event = wd.events("publication")[2]
    assert (event["staleness_predicted"], event["trained"]["mean"], event["trained"]["max"]) == (1.0, 1.0, 1.0)
    assert (event["offered"]["n"], event["offered"]["mean"]) == (2, 1.0)


def test_interpolated_staleness_of_a_group_admitted_between_publications(world):
    wd = start(
        world, system__dispatch="continuous", system__groups_per_step=1, system__rollouts_per_group=1, system__target_staleness=4.0, train__steps=9
    )
    first = wd.lease(4)
    wd.end(first[0])
    wd.now += 10
    wd.accumulate(wd.claim(1).micro_step_id, 1)  # the claim takes a group: its slot is free, another is admitted
    new = wd.events("admitted")[-1]["group"]
    wd.train(1)
    wd.now += 10
    wd.publish(1)
    group = wd.machine.state.groups[new]
    assert (group.version_step, group.fraction, group.version_next) == (0, 0.5, 1)


# --- evaluation ---


def test_evaluation_is_leased_first_and_is_outside_groups_and_counts(world):
    wd = start(world, heldout=3, tasks__eval_every=2, train__steps=3)
    leased = wd.lease(4)
    assert [t.purpose for t in leased] == [Purpose.EVAL] * 3 + [Purpose.TRAIN]
    counters = wd.machine.counters()
    assert (counters.admitted, counters.eval_outstanding, sum(counters.states.values())) == (4, 3, 4)
    for t, reward in zip(leased[:3], (1.0, 0.0, 0.5), strict=True):
        wd.end(t, reward)
    event = wd.events("eval")[0]
    assert (event["version"], event["n"], event["graded"], event["reward_mean"]) == (0, 3, 3, 0.5)
    assert event["by_kind"] == {"kind0": {"n": 2, "reward_mean": 0.75}, "kind1": {"n": 1, "reward_mean": 0.0}}
    assert (event["version_min"], event["version_max"]) == (0, 0)
    wd.end(leased[3])
    for step in (1, 2, 3):
        wd.finish_all()
        wd.train(step)
        wd.publish(step)
        assert wd.machine.finished is False
    assert [e["version"] for e in wd.events("eval_issued")] == [0, 2, 3]
    wd.finish_all()
    assert wd.machine.finished and wd.kinds()[-1] == "finished"


def test_evaluation_goes_on_when_a_core_resumed_within_a_burst(world):
    wd = start(world, heldout=1, tasks__eval_every=1, train__steps=20, system__steps_per_burst=2, system__target_staleness=1.5)
    for step in (1, 2, 3):
        wd.finish_all()
        wd.train(step)
        if step == 2:
            wd.publish(step)
    wd.core(3)  # from a checkpoint between two publications: from now on the odd versions are published
    wd.publish(3)
    for step in range(4, 10):
        wd.finish_all()
        wd.train(step)
        if step % 2:
            wd.publish(step)
    assert [e["version"] for e in wd.events("eval_issued")] == [0, 2, 5, 7, 9]


def test_evaluation_is_off_by_default_and_lost_ones_are_counted_as_not_graded(world):
    assert start(world, heldout=3).machine.counters().eval_outstanding == 0
    wd = start(world, heldout=2, tasks__eval_every=1, sandbox__reissues=0)
    a, b = wd.lease(2)
    wd.end(a, None, Ending.SANDBOX_LOST)
    wd.end(b, 1.0)
    assert (wd.events("eval")[0]["n"], wd.events("eval")[0]["graded"]) == (2, 1)


# --- who waits ---


@pytest.mark.pain(4)
def test_a_stall_is_logged_with_who_waits_for_whom(world):
    wd = start(world, run__stall_s=100.0, sandbox__lease_ttl_s=1000.0)
    wd.lease(3, holder="sb/7")
    wd.send(w.ClaimMicroStep(id="C", term=1, step=1, cell="core", incarnation="i1", wait_s=1e6), holder="core/1")
    wd.tick(99.0)
    assert wd.events("stall") == []
    wd.tick(1.0)
    (stall,) = wd.events("stall")
    assert {(x["who"], x["for"]) for x in stall["waits"]} == {
        ("core/1", "step 1 has 0 of 2 groups; 2 groups are out: 3 rollouts running, 1 tickets without a sandbox"),
        ("buffer", "3 rollouts of sb/7"),
        ("buffer", "a sandbox for 1 tickets"),
    }
    wd.tick(50.0)
    assert len(wd.events("stall")) == 1


def test_a_stall_where_a_trainer_or_an_engine_may_load_is_not_spoken_of_before_its_time(world):
    wd = world(run__stall_s=100.0, run__start_timeout_s=500.0)
    wd.tick(599.0)
    assert wd.events("stall") == []
    wd.tick(1.0)
    assert len(wd.events("stall")) == 1


@pytest.mark.pain(4)
def test_a_coordinators_stall_gets_what_the_buffer_knows_and_is_the_only_one(world):
    wd = start(world, run__stall_s=100.0, sandbox__lease_ttl_s=1000.0)
    wd.lease(3, holder="sb/7")
    wd.tick(99.0)
    wd.send(w.Note(id="n", event="stall", fields={"stacks": {"core": "…"}, "waits": "nonsense"}), holder="coord/1")
    wd.tick(99.0)
    (stall,) = wd.events("stall")
    assert stall["stacks"] == {"core": "…"} and stall["idle_s"] == 99.0 and stall["counts"]["running"] == 3
    assert ("buffer", "3 rollouts of sb/7") in {(x["who"], x["for"]) for x in stall["waits"]}


def test_a_note_is_an_event_once(world):
    wd = world()
    note = w.Note(id="n", cause="c", event="warning", fields={"x": 1})
    for _ in range(2):
        assert isinstance(wd.one(note, holder="core/1"), w.Ack)
    assert [(e.kind, e.fields, e.proc) for e in wd.log if e.kind == "warning"] == [("warning", {"x": 1}, "core/1")]


# --- at random ---


@pytest.mark.pain(32)
@pytest.mark.parametrize("seed", range(60))
def test_random_histories_finish_add_up_and_consume_nothing_twice(run_simulation, seed):
    """`World.check` recounts after every input; the simulation asserts that it ends."""
    wd = run_simulation(seed)
    assert wd.machine.finished, wd.machine.failure
    states = wd.machine.counters().states
    assert states["consumed"] + states["discarded"] + states["ready"] == wd.machine.counters().admitted


def test_a_claim_whose_answer_was_lost_is_given_again(world):
    """A repeated message that arrives after its poll was answered must not walk away with the micro-step."""
    wd = start(world, system__groups_per_step=1, system__rollouts_per_group=2)
    a = w.ClaimMicroStep(id="A", term=1, step=1, cell="core", incarnation="i", wait_s=2.0)
    assert wd.send(a) == []
    assert [type(m) for _, m in wd.tick(2.1)] == [w.NothingToClaim]
    (known,) = wd.send(a)  # repeated: its first answer was on its way
    assert isinstance(known[1], w.NothingToClaim)
    wd.finish_all()
    first = wd.one(msgspec.structs.replace(a, id="B"))
    assert isinstance(first, w.MicroStepClaimed) and first.cause == "B"
    again = wd.one(msgspec.structs.replace(a, id="C"))  # B's answer was lost
    assert isinstance(again, w.MicroStepClaimed) and (again.cause, again.micro_step_id) == ("C", first.micro_step_id)
    done = w.Accumulated(id="d", term=1, step=1, micro_step_id=first.micro_step_id, cell="core", incarnation="i")
    assert isinstance(wd.one(done), w.Ack)
    assert wd.one(msgspec.structs.replace(a, id="E")).drained
