"""Several cells in one step: what the buffer's machine does about those that die, stop, come back or belong to an older term."""

from __future__ import annotations

import pytest

from gyre.types import Version
from gyre.wire import messages as w

TTL_S = 60.0


class Cell:
    """A cell's trainer, as far as the buffer sees it."""

    def __init__(self, world, cell: str, incarnation: str = "a") -> None:
        self.world, self.cell, self.incarnation, self.term = world, cell, incarnation, world.machine.state.meta.term
        self.held: list[str] = []

    def claim(self, step: int, wait_s: float = 0.0):
        return self.world.one(
            w.ClaimMicroStep(id=self.world.id(), term=self.term, step=step, cell=self.cell, incarnation=self.incarnation, wait_s=wait_s)
        )

    def accumulate(self, step: int, micro_step_id: str):
        return self.world.one(
            w.Accumulated(id=self.world.id(), term=self.term, step=step, micro_step_id=micro_step_id, cell=self.cell, incarnation=self.incarnation)
        )

    def take(self, step: int) -> str:
        """Claim one and accumulate it."""
        got = self.claim(step)
        assert isinstance(got, w.MicroStepClaimed), got
        assert isinstance(self.accumulate(step, got.micro_step_id), w.Ack)
        self.held.append(got.micro_step_id)
        return got.micro_step_id

    def renew(self):
        return self.world.one(w.RenewClaims(id=self.world.id(), term=self.term, cell=self.cell, incarnation=self.incarnation))

    @property
    def member(self) -> w.Member:
        return w.Member(self.cell, self.incarnation)


def void(world, step: int, *cells: Cell, reason: str = "lost", term: int | None = None):
    term = world.machine.state.meta.term if term is None else term
    return world.one(w.VoidIncarnations(id=world.id(), term=term, step=step, cells=[c.member for c in cells], reason=reason))


def parts(manifest: w.Manifest) -> dict[str, list[str]]:
    return {f"{e.cell}/{e.incarnation}": e.micro_steps for e in manifest.entries}


@pytest.fixture
def step(world):
    """Step 1 with six micro-steps, and three cells."""
    wd = world(
        system__groups_per_step=2, system__rollouts_per_group=3, system__target_staleness=0.0, train__steps=3,
        train__micro_step_tokens=1, train__claim_ttl_s=TTL_S,
    )  # fmt: skip
    wd.core()
    wd.publish(0)
    wd.finish_all()
    return wd, *(Cell(wd, name) for name in ("core", "sat1", "sat2"))


def test_the_manifest_names_each_cells_part(step):
    wd, core, one, two = step
    for cell in (core, core, core, one, one, two):
        cell.take(1)
    manifest = wd.seal(1)
    assert parts(manifest) == {"core/a": sorted(core.held), "sat1/a": sorted(one.held), "sat2/a": sorted(two.held)}
    assert isinstance(wd.commit(1, manifest.hash), w.Ack)


def test_voided_in_a_sealed_step(step):
    """Exactly the dead cell's micro-steps are claimed again; the survivors' parts stand; the old manifest commits nothing any more."""
    wd, core, one, two = step
    for cell in (core, core, one, one, two, two):
        cell.take(1)
    first = wd.seal(1)
    wd.tick(10 * TTL_S)  # a sealed step waits for its core, whatever the leases say
    assert wd.events("voided") == [] and wd.seal(1).hash == first.hash
    assert isinstance(void(wd, 1, one, reason="lost in the reduction"), w.Ack)
    (event,) = wd.events("voided")
    assert (event["cell"], event["reason"], event["micro_steps"]) == ("sat1", "lost in the reduction", one.held)
    assert wd.commit(1, first.hash).stale
    wd.tick(TTL_S / 2)
    assert len(wd.events("voided")) == 1, "the survivors' leases begin anew when the step opens again"
    assert sorted([core.take(1), two.take(1)]) == one.held
    second = wd.seal(1)
    assert second.hash != first.hash and parts(second) == {"core/a": sorted(core.held), "sat2/a": sorted(two.held)}
    wd.restart()
    assert wd.seal(1).hash == second.hash
    assert isinstance(wd.commit(1, second.hash), w.Ack)


def test_voiding_is_idempotent(step):
    wd, core, one, _ = step
    one.take(1)
    assert isinstance(void(wd, 1, one), w.Ack) and isinstance(void(wd, 1, one), w.Ack)
    again = [core.take(1) for _ in range(6)]
    assert isinstance(void(wd, 1, one), w.Ack), "a late repetition takes nothing from who has it now"
    assert len(wd.events("voided")) == 1 and parts(wd.seal(1)) == {"core/a": sorted(again)}


def test_a_zombie_is_refused_whatever_it_says(step):
    """Stopped, its lease over, woken: claim, accumulated and renewal are stale; as a new incarnation it takes part again."""
    wd, core, one, _ = step
    kept = one.take(1)
    under_way = one.claim(1).micro_step_id
    for _ in range(3):
        wd.tick(TTL_S / 2)
        core.take(1) if _ == 0 else core.renew()
    assert [e["cell"] for e in wd.events("voided")] == ["sat1"] and wd.events("voided")[0]["micro_steps"] == [kept, under_way]
    for answer in (one.accumulate(1, under_way), one.claim(1), one.renew()):
        assert isinstance(answer, w.Refuse) and answer.stale
    wd.restart()
    assert one.claim(1).stale
    one = Cell(wd, "sat1", "b")
    assert {one.take(1) for _ in range(5)} >= {kept, under_way}
    assert parts(wd.seal(1)).keys() == {"core/a", "sat1/b"}


def test_an_older_term_is_refused(step):
    """A satellite of the core that was lost, and that core itself: nothing of theirs counts under the new term."""
    wd, core, one, _ = step
    one.take(1)
    assert wd.core(0).term == 2
    wd.publish(0)
    late = (
        w.CommitStep(id=wd.id(), term=core.term, step=1, hash="h", metrics={}), w.SealStep(id=wd.id(), term=core.term, step=1, wait_s=0.0),
        w.Published(id=wd.id(), version=Version(core.term, 0), cells=["c"], seconds=0.0),
        w.CheckpointSaved(id=wd.id(), term=core.term, step=0, path=""),
    )  # fmt: skip
    for answer in (one.claim(1), one.accumulate(1, one.held[0]), one.renew(), void(wd, 1, one, term=1), core.claim(1), *map(wd.one, late)):
        assert isinstance(answer, w.Refuse) and answer.stale, answer
    one = Cell(wd, "sat1", "b")
    everything = [one.take(1) for _ in range(6)]
    assert parts(wd.seal(1)) == {"sat1/b": sorted(everything)}, "all six are done again, once"


def test_a_new_life_opens_no_sealed_step(step):
    """A satellite restarted while the core reduces: what the core may have reduced already stays in the manifest. It is voided at its next claim
    in an open step, and so it is when the core voids it."""
    wd, core, one, _ = step
    for _ in range(3):
        core.take(1)
        one.take(1)
    manifest = wd.seal(1)
    reborn = Cell(wd, "sat1", "b")
    got = reborn.claim(1)
    assert isinstance(got, w.NothingToClaim) and got.drained
    assert wd.seal(1).hash == manifest.hash and isinstance(wd.commit(1, manifest.hash), w.Ack)


def test_a_new_life_voids_the_old_one_in_an_open_step(step):
    wd, _, one, _ = step
    held = one.take(1)
    assert Cell(wd, "sat1", "b").take(1) == held


def test_a_seal_waits_for_outstanding_claims_or_their_lease(step):
    wd, core, one, _ = step
    for _ in range(5):
        core.take(1)
    hanging = one.claim(1).micro_step_id
    seal = w.SealStep(id="S", term=1, step=1, wait_s=1e6)
    assert wd.send(seal) == []
    for _ in range(3):
        wd.tick(TTL_S / 2)
        core.renew()
    assert one.accumulate(1, hanging).stale
    assert core.take(1) == hanging
    assert sum(len(p) for p in parts(wd.seal(1)).values()) == 6


def test_a_question_that_waits_can_be_hurried(world):
    """The same claim with a shorter wait is answered at once: a cell told to roll out does not sit out its wait."""
    wd = world(system__groups_per_step=1, system__rollouts_per_group=1, system__target_staleness=0.0)
    wd.core()
    wd.publish(0)
    claim = w.ClaimMicroStep(id="C", term=1, step=1, cell="sat", incarnation="a", wait_s=100.0)
    assert wd.send(claim) == []
    got = wd.one(w.ClaimMicroStep(id="C", term=1, step=1, cell="sat", incarnation="a", wait_s=0.0))
    assert isinstance(got, w.NothingToClaim) and not got.drained
