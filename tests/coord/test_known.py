"""What the coordinator learns from the run's events for `lookahead`."""

from __future__ import annotations

from typing import Any

from gyre.coord.known import Knowledge
from gyre.rules.roles import GroupView


def step(cells: dict[str, int], seconds: float) -> dict[str, Any]:
    entries = [{"cell": c, "incarnation": "1", "micro_steps": ["m"] * n} for c, n in cells.items()]
    return {"entries": entries, "micro_steps": sum(cells.values()), "metrics": {"seconds_compute": seconds}, "stats": {"groups": 2}}


def test_ages_durations_and_costs() -> None:
    k = Knowledge()
    k.hear("term", 0.0, {"cell": "cell0"})
    k.hear("admitted", 100.0, {"group": "g0", "rollouts": 2})
    k.hear("admitted", 100.0, {"group": "g1", "rollouts": 2})
    k.hear("leased", 101.0, {"rollouts": ["g0.0", "g0.1", "g1.0"]})
    assert k.known(103.0, 2, 0.0) is None  # no step was measured
    k.hear("rollout_ended", 105.0, {"rollout": "g0.0", "group": "g0"})
    k.hear("rollout_ended", 108.0, {"rollout": "g0.1", "group": "g0"})
    k.hear("group_ready", 108.0, {"group": "g0"})
    k.hear("role", 108.0, {"cell": "cell0", "phase": "to_train"})
    k.hear("role", 110.0, {"cell": "cell0", "phase": "train"})
    k.hear("reduced", 119.0, {"seconds": 1.0})
    k.hear("update", 120.0, {"seconds": 2.0})
    k.hear("step", 120.0, step({"cell0": 3, "cell1": 1}, 6.0))  # 2 s each, 4 of them for 2 groups
    k.hear("publication", 0.0, {"step": 0, "seconds": 50.0})
    k.hear("publication", 130.0, {"step": 1, "seconds": 5.0})
    known = k.known(111.0, 1, 0.5)
    assert known is not None
    assert known.groups == (GroupView(2, 5.0),)  # one of ten seconds, one without a lease
    assert (known.durations_s, known.group_durations_s) == ((4.0, 7.0), (7.0,))
    assert (known.train_s, known.to_train_s, known.update_s, known.publish_s, known.trained) == (4.0, 2.0, 3.0, 5.0, 0.5)
    assert k.known(111.0, 2, 0.0) is None  # a group is out that was admitted before this coordinator began


def test_a_ticket_issued_again_starts_anew() -> None:
    k = Knowledge()
    k.hear("term", 0.0, {"cell": "cell0"})
    k.hear("step", 1.0, step({"cell0": 2}, 2.0))
    k.hear("admitted", 1.0, {"group": "g0", "rollouts": 1})
    k.hear("leased", 2.0, {"rollouts": ["g0.0"]})
    k.hear("reissued", 8.0, {"rollout": "g0.0"})
    k.hear("leased", 10.0, {"rollouts": ["g0.0"]})
    known = k.known(12.0, 1, 0.0)
    assert known is not None and known.groups == (GroupView(1, 2.0),)
    k.hear("group_discarded", 13.0, {"group": "g0"})
    assert k.known(14.0, 0, 0.0).groups == ()  # type: ignore[union-attr]
