"""What the buffer holds in memory: rows that something can still happen to, however long the run."""

from __future__ import annotations

import msgspec
import pytest

from gyre.buffer.effects import Prune, Received
from gyre.buffer.ledger import Ledger
from gyre.buffer.machine import Machine
from gyre.types import RolloutState
from gyre.wire import messages as w

STEPS = 40


def held(machine):
    """The rows in memory, by kind; those of evaluations aside, which have one each."""
    s = machine.state
    kinds = {"queries": s.queries, "groups": s.groups, "rollouts": s.rollouts, "steps": s.steps, "micro-steps": s.micro_steps, "tickets": s.tickets}
    return {name: len(rows) for name, rows in kinds.items()} | {"members": sum(map(len, s.members.values()))}


@pytest.fixture
def trained(world):
    """40 steps with a checkpoint behind each, evaluations and discarded groups among them; what was held after each step, the groups of each."""
    wd = world(heldout=3, system__groups_per_step=3, system__rollouts_per_group=4, system__target_staleness=1.0, train__steps=STEPS + 9,
               tasks__eval_every=2, train__drop_uniform=True)  # fmt: skip
    wd.core()
    wd.publish(0)
    sizes, groups = [], {}
    for step in range(1, STEPS + 1):
        while tickets := wd.lease(64):
            for t in tickets:
                wd.end(t, float(t.index % 2) if step % 5 or not t.group_id.endswith("0") else 1.0)
        wd.train(step)
        groups[step] = list(wd.machine.state.steps[step].groups)
        assert isinstance(wd.one(w.CheckpointSaved(id=wd.id(), term=1, step=step, path=f"step-{step}")), w.Ack)
        wd.publish(step)
        sizes.append(held(wd.machine))
    return wd, sizes, groups


@pytest.mark.pain(10)
def test_memory_is_flat(trained):
    """pain 10"""
    wd, sizes, _ = trained
    states = wd.machine.counters().states
    assert states["consumed"] > 30 * 12 and states["discarded"] > 0
    early, late = sizes[1:11], sizes[-10:]
    for kind in early[0]:
        assert max(x[kind] for x in late) <= max(x[kind] for x in early), kind


@pytest.mark.pain(10)
def test_a_restart_reads_what_is_not_settled(trained, tmp_path):
    wd, _, _ = trained
    ledger = Ledger(tmp_path)
    ledger.commit(wd.stored(), [], []).result()
    again = Machine(wd.cfg, wd.tasks, ledger.rows(), wd.clock(), "run", ledger.counts())
    assert {k: n for k, n in held(again).items() if k != "tickets"} == {k: n for k, n in held(wd.machine).items() if k != "tickets"}
    assert msgspec.structs.replace(again.counters(), seq=0) == msgspec.structs.replace(wd.machine.counters(), seq=0)
    assert set(map(repr, ledger.rows_from(7))) == set(map(repr, wd.since(7)))
    ledger.close()


@pytest.mark.pain(10)
@pytest.mark.parametrize("restart", [False, True])
def test_a_core_from_an_older_checkpoint_finds_what_was_forgotten(trained, restart):
    """The last checkpoints may be damaged."""
    wd, _, groups = trained
    if restart:
        wd.restart()
    before = wd.machine.counters()
    assert wd.core(step=25).step == 25
    states = wd.machine.counters().states
    again = sum(len(g) for step, g in groups.items() if step > 25)
    assert again == 45 and before.states["consumed"] - states["consumed"] == 4 * again
    assert wd.machine.counters().admitted == before.admitted
    wd.publish(25)
    for step in (26, 27):
        wd.train(step, incarnation="i2")
        assert wd.machine.state.steps[step].groups == groups[step]
        wd.publish(step)
    assert sum(wd.machine.state.counts[s] for s in RolloutState) == before.admitted


def test_payloads_are_needed_until_the_oldest_checkpoint_has_them(world):
    wd = world(system__groups_per_step=2, train__steps=9, train__keep_checkpoints=2, run__keep_payloads="needed")
    wd.core()
    wd.publish(0)
    pruned = []
    for step in range(1, 5):
        for t in wd.lease(64):
            wd.end(t, 1.0)
        wd.train(step)
        saved = Received("peer", w.CheckpointSaved(id=wd.id(), term=1, step=step, path=f"step-{step}"), "core/1")
        effects = wd.machine.handle(wd.clock(), saved)
        wd.apply(effects)
        pruned.append([e.step for e in effects if isinstance(e, Prune)])
        wd.publish(step)
    assert pruned == [[], [1], [2], [3]], "one checkpoint behind; the policy of the last was not out yet"
    refused = wd.one(w.AcquireTerm(id=wd.id(), cell="core", step=2, checkpoint_term=1))
    assert isinstance(refused, w.Refuse) and "keep_payloads" in refused.reason and not refused.stale
    assert wd.core(step=3).step == 3
