"""The judges are judged: each fault that is planted in a machine, a loop's parts or the world is found, by the judge it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from theorem.buffer import Disk
from theorem.collective import MemoryCollective
from theorem.learner import TableLearner
from theorem.trial import trial

from gyre.buffer import training
from gyre.buffer.machine import Machine
from gyre.buffer.state import State
from gyre.wire.rows import GroupState

Patch = Callable[[Any, str, Any], None]


def counts_a_micro_step_twice(patch: Patch) -> None:
    accumulate, calls = TableLearner.accumulate, [0]

    def twice(self: TableLearner, data: Any, version: int) -> None:
        calls[0] += 1
        accumulate(self, data, version)
        if calls[0] % 5 == 0:
            accumulate(self, data, version)

    patch(TableLearner, "accumulate", twice)


def forgets_a_micro_step(patch: Patch) -> None:
    accumulate, calls = TableLearner.accumulate, [0]

    def not_always(self: TableLearner, data: Any, version: int) -> None:
        calls[0] += 1
        if calls[0] % 5:
            accumulate(self, data, version)

    patch(TableLearner, "accumulate", not_always)


def does_not_zero(patch: Patch) -> None:
    patch(TableLearner, "zero", lambda self: setattr(self, "totals", None))


def reduces_one_cell_twice(patch: Patch) -> None:
    reduce = MemoryCollective._reduce

    async def twice(self: MemoryCollective, met: Any, operation: Any, group: Any) -> None:
        await reduce(self, met, operation, group)
        if group.rank == 0:
            assert self._learner.totals is not None
            self._learner.totals = [t + part for t, part in zip(self._learner.totals, operation.parts[group.size - 1], strict=True)]

    patch(MemoryCollective, "_reduce", twice)


def keeps_what_was_voided(patch: Patch) -> None:
    def only_says_so(s: State, cell: str, incarnation: str, reason: str, cause: str) -> None:
        s.claims.pop((cell, incarnation), None)
        s.log("voided", cause, cell=cell, incarnation=incarnation, reason=reason, micro_steps=[])

    patch(training, "void", only_says_so)


def commits_groups_twice(patch: Patch) -> None:
    move, again = State.move_group, set[str]()

    def back(self: State, group: Any, state: GroupState) -> None:
        move(self, group, state)
        if state is GroupState.CONSUMED and group.group_id not in again:
            again.add(group.group_id)
            move(self, group, GroupState.READY)

    patch(State, "move_group", back)


def grants_a_term_twice(patch: Patch) -> None:
    acquire = training.on_acquire

    def same(s: State, now: Any, to: Any, m: Any) -> None:
        if s.meta.term and s.replies.get(m.id) is None:
            s.meta.term -= 1
        acquire(s, now, to, m)

    patch(training, "on_acquire", same)


def says_before_it_is_durable(patch: Patch) -> None:
    write = Disk.commit

    def lossy(self: Disk, puts: Any, drops: Any, events: Any) -> None:
        write(self, puts, drops, [e for e in events if e.kind != "step"])

    patch(Disk, "commit", lossy)


def miscounts(patch: Patch) -> None:
    counters = Machine.counters

    def wrong(self: Machine, *ids: str) -> Any:
        c = counters(self, *ids)
        return msgspec.structs.replace(c, states={**c.states, "queued": c.states["queued"] + 1})

    patch(Machine, "counters", wrong)


def broadcasts_nothing(patch: Patch) -> None:
    broadcast = MemoryCollective._broadcast

    async def old_weights(self: MemoryCollective, met: Any, operation: Any, group: Any) -> None:
        before = [t.clone() for t in self._learner.weights]
        await broadcast(self, met, operation, group)
        for t, old in zip(self._learner.weights, before, strict=True):
            t.copy_(old)

    patch(MemoryCollective, "_broadcast", old_weights)


def trains_on_torn_weights(patch: Patch) -> None:
    def half(self: TableLearner, specs: Any, data: memoryview) -> None:
        weights = torch.frombuffer(bytearray(data), dtype=torch.float64)
        self.weights[0][:20] = weights[:20]

    patch(TableLearner, "install", half)


def divides_by_another_number(patch: Patch) -> None:
    update = TableLearner.update
    patch(TableLearner, "update", lambda self, step, executions, trainable: update(self, step, executions + 1, trainable))


PLANTED = {
    counts_a_micro_step_twice: "partition",
    forgets_a_micro_step: "partition",
    does_not_zero: "partition",
    reduces_one_cell_twice: "partition",
    keeps_what_was_voided: "voided",
    commits_groups_twice: "lineage",
    grants_a_term_twice: "cores",
    says_before_it_is_durable: "durable",
    miscounts: "counts",
    broadcasts_nothing: "weights",
    trains_on_torn_weights: "weights",
    divides_by_another_number: "weights",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch.setattr)
    judge = PLANTED[plant]
    for seed in range(40):
        if any(f.startswith(f"{judge}: ") for f in trial(seed).findings):
            return
    raise AssertionError(f"40 worlds with the fault and the judge of {judge} found nothing")
