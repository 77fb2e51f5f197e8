"""What the coordinator knows of the executions in flight, from literal events."""

from __future__ import annotations

from gyre.coord.known import Knowledge
from gyre.rules.named import make_rule
from gyre.rules.roles import CellPhase, CellView, GroupView, Known, View


def ended(k: Knowledge, now: float, rollout: str, state: str = "waiting") -> None:
    k.take(now, "rollout_ended", {"group": rollout.rpartition(".")[0], "rollout": rollout, "state": state})


def known(k: Knowledge, now: float) -> Known:
    found = k.known(now)
    assert found is not None
    return found


def step(k: Knowledge, now: float, compute_s: float) -> None:
    k.take(now, "step", {"metrics": {"seconds_compute": compute_s}})


def test_ages_lengths_and_costs() -> None:
    k = Knowledge(groups_per_step=2)
    assert k.known(0.0) is None
    step(k, 0.0, 3.0)
    k.take(0.0, "admitted", {"group": "g0", "rollouts": 2})
    k.take(0.0, "admitted", {"group": "g1", "rollouts": 2})
    k.take(1.0, "leased", {"rollouts": ["g0.0", "g0.1", "g1.0", "e0.0.1"]})
    assert known(k, 4.0).groups == (GroupView(2, 3.0), GroupView(2, 1.5)), "one that is queued has age 0"
    ended(k, 5.0, "g0.0")
    k.take(6.0, "reissued", {"rollout": "g1.0"})
    ended(k, 9.0, "g0.1")
    ended(k, 9.5, "g1.1", "discarded")
    view = known(k, 10.0)
    assert view.groups == (GroupView(1, 0.0),)
    assert (view.durations_s, view.group_durations_s) == ((4.0, 8.0), (8.0,))
    k.take(10.0, "group_discarded", {"group": "g1"})
    assert known(k, 10.0).groups == ()
    for kind, fields in (
        ("role", {"cell": "a", "phase": "to_train"}), ("reduced", {"cells": ["a", "b"]}), ("update", {"seconds": 0.5}),
        ("step", {"metrics": {"seconds_compute": 1.5}}), ("publication", {"seconds": 2.0}),
    ):  # fmt: skip
        k.take(20.0, kind, fields)
    k.take(24.0, "role", {"cell": "a", "phase": "train"})
    view = known(k, 25.0)
    assert (view.train_s, view.to_train_s, view.update_s, view.publish_s) == (1.5, 4.0, 0.5, 2.0), "one cell's 1.5, two cells' 1.5"


def test_lookahead_can_use_it() -> None:
    """Enough executions have ended: the rule decides by its model, and says so."""
    k = Knowledge(groups_per_step=2)
    for n in range(30):
        k.take(float(n), "admitted", {"group": f"g{n}", "rollouts": 4})
        k.take(float(n), "leased", {"rollouts": [f"g{n}.{i}" for i in range(4)]})
        for i in range(4 if n < 28 else 1):
            ended(k, n + 1.0 + (i * n) % 7, f"g{n}.{i}")
    step(k, 39.0, 2.0)
    cells = tuple(CellView(c, CellPhase.ROLLOUT, 8) for c in "abc")
    view = View(
        now=40.0,
        cells=cells,
        water_level=6,
        burst=1,
        steps_left=1,
        ready=1,
        groups_per_step=2,
        steps_per_burst=1,
        rollouts_per_group=4,
        known=k.known(40.0),
    )
    reason = make_rule("lookahead")(view).reason
    assert "the burst ends" in reason or "ends the burst soonest" in reason
