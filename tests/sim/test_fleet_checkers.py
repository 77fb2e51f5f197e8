"""The judges of whole runs are judged: each fault that is planted is found, by the judge it is for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from theorem import trial

from gyre.buffer import sandboxes
from gyre.buffer.state import State
from gyre.coord import machine, roles
from gyre.rollout.engine import Transcript
from gyre.rules import admission
from gyre.sandbox.gateway import route
from gyre.wire.messages import Route
from gyre.wire.rows import GroupState

Patch = Callable[[Any, str, Any], None]


def starts_nobody_again(patch: Patch) -> None:
    patch(trial, "END_S", 300.0)
    patch(machine.Machine, "_pause_s", staticmethod(lambda p: 1e9))


def loses_what_a_new_term_replays(patch: Patch) -> None:
    move = State.move_group

    def not_back(self: State, group: Any, state: GroupState) -> None:
        if (group.state, state) == (GroupState.CONSUMED, GroupState.READY):
            state = GroupState.CONSUMED
        move(self, group, state)

    patch(State, "move_group", not_back)


def admits_one_too_many(patch: Patch) -> None:
    admit = admission.admit
    patch(admission, "admit", lambda *numbers: admit(*numbers) + 1)


def issues_again_under_the_same_epoch(patch: Patch) -> None:
    retry = sandboxes.retry

    def same(s: State, now: Any, row: Any, cause: str) -> None:
        before = row.epoch
        retry(s, now, row, cause)
        row.epoch = before

    patch(sandboxes, "retry", same)


def stamps_another_version(patch: Patch) -> None:
    done = route._Partial.done

    def next_one(self: Any, finish: str) -> Any:
        self.versions = array("i", [v + 1 for v in self.versions])
        return done(self, finish)

    patch(route._Partial, "done", next_one)


def wakes_beside_a_trainer(patch: Patch) -> None:
    patch(roles.Roles, "_out", lambda self, name, cell, role: True)


def opens_every_route(patch: Patch) -> None:
    patch(roles, "Route", lambda cell, address, rank, open: Route(cell, address, rank, True))


def draws_again_from_the_start(patch: Patch) -> None:
    patch(Transcript, "draws", property(lambda self: len(self.token_ids)))


PLANTED = {
    starts_nobody_again: "progress",
    loses_what_a_new_term_replays: "fates",
    admits_one_too_many: "quota",
    issues_again_under_the_same_epoch: "leases",
    stamps_another_version: "tokens",
    wakes_beside_a_trainer: "devices",
    opens_every_route: "routes",
    draws_again_from_the_start: "seen",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch.setattr)
    for seed in range(60):
        if any(f.startswith(f"{PLANTED[plant]}: ") for f in trial.fleet_trial(seed).findings):
            return
    raise AssertionError(f"60 worlds with the fault and the judge of {PLANTED[plant]} found nothing")
