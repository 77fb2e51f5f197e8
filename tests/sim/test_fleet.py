"""A whole run in the deterministic world: whatever dies, stops or is cut off, the coordinator and the buffer included, it comes to its end and
nothing is lost, doubled or routed where it must not be.

GYRE_SEEDS=5000 plays so many worlds, GYRE_SEED=17 that one. See docs/theorem.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from theorem.fleet import MOMENTS, FleetPlan, fleet
from theorem.plan import Fault
from theorem.trial import Verdict, fleet_command, fleet_trial, play

SEEDS = [int(os.environ["GYRE_SEED"])] if "GYRE_SEED" in os.environ else range(int(os.environ.get("GYRE_SEEDS", "200")))
REGRESSIONS = (2, 19, 25, 61, 82, 169, 177, 203, 280, 283)
"""Seeds that found something once.
2: a trainer loaded its model onto the device where its cell's engine was waking.
19, 280: orders of a coordinator that came back were no newer than those of the one before.
25: trainers loaded anew for another core beside serving engines.
61: under `colocate` a step waited for executions that no cell served. 82: and nobody closed a step all of whose groups were lost.
169: a core that was waking said idle to an order that came meanwhile.
177: the coordinator, cut off from the buffer at the run's end, took a sandbox that was done for one that had failed.
203: a silent trainer was taken for one that has ended, and its engine woken beside it.
283: a process that the coordinator had killed, because it stood still, was held against a run that had ended meanwhile."""


def holds(verdict: Verdict) -> None:
    """Nothing is wrong with a world, or the seed, the command that plays it again, and what is wrong."""
    wrong = "\n".join(verdict.findings[:10])
    assert not wrong, f"seed {verdict.plan.seed}, again with: {fleet_command(verdict.plan.seed)}\n{wrong}\nwhat befell it: {verdict.struck}"


@cache
def happened(seed: int) -> Counter[str]:
    """Play a world; what happened in it, counted."""
    verdict = fleet_trial(seed)
    holds(verdict)
    c, plan = verdict.chronicle, verdict.plan
    assert isinstance(plan, FleetPlan)
    kinds = [f"{what} {name.partition('/')[0].rpartition('-')[2].rstrip('0123456789')}" for _, _, what, name, *_ in map(str.split, verdict.struck)]
    lives = Counter(name.partition("/")[0] for name in c.ends)
    doomed = ["given up" for n in lives.values() if n > 5]
    moved = ["moved"] * sum(len({d.process for d in c.drawn if d.request.rpartition(".")[0] == call}) > 1 for call in calls(verdict))
    turns = [f"turned {e.fields['phase']}" for e in c.disk.events if e.kind == "role"]
    return Counter([*kinds, *doomed, *moved, *turns, plan.rule, *(e.kind for e in c.disk.events)])


def calls(verdict: Verdict) -> set[str]:
    return {d.request.rpartition(".")[0] for d in verdict.chronicle.drawn}


@pytest.mark.pain(14)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_comes_to_its_end(seed: int) -> None:
    assert happened(seed)["step"]


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_found_once(seed: int) -> None:
    holds(fleet_trial(seed))


@cache
def calm(seed: int) -> FleetPlan:
    plan = fleet(6 * seed)
    assert not plan.faults
    return replace(plan, rule="elastic", cells=(("c0", True, True), ("c1", True, True)))


@pytest.mark.parametrize(("kind", "moment"), [(kind, moment) for kind, moments in MOMENTS.items() for moment in moments])
def test_a_process_is_lost_at_any_moment(kind: str, moment: str) -> None:
    for what in ("kill",) if kind == "train" else ("kill", "stop"):
        holds(play(replace(calm(1), faults=(Fault(what, kind, moment, 1, 1, 8.0),))))


@pytest.mark.parametrize("moment", ["WorkerStatus", "hold", "CommitStep", "Published"])
def test_all_are_lost_at_once(moment: str) -> None:
    holds(play(replace(calm(2), faults=(Fault("all", "train", moment, 2, 1, 0.0),))))


def test_a_cell_is_given_up_and_its_successor_is_the_core() -> None:
    verdict = play(replace(calm(3), faults=(Fault("doom", "train", "RenewClaims", 1, 1, 0.0),)))
    holds(verdict)
    assert sum(name.startswith("c0-train/") for name in verdict.chronicle.ends) > 5


def test_worlds_are_not_empty() -> None:
    seen = sum((happened(seed) for seed in range(60)), Counter[str]())
    wanted = {
        "kill coord": 5, "kill buffer": 4, "kill train": 5, "kill rollout": 3, "kill box": 1, "stop coord": 1, "cut train": 2, "all are": 4,
        "turned train": 40, "turned rollout": 80, "turned lost": 5, "moved": 10, "voided": 2, "reissued": 20, "term": 65, "colocate": 10,
    }  # fmt: skip
    assert {k: seen[k] for k, n in wanted.items() if seen[k] < n} == {}, seen


def test_a_seed_is_a_history() -> None:
    digest = fleet_trial(11).chronicle.digest()
    assert fleet_trial(11).chronicle.digest() == digest != fleet_trial(12).chronicle.digest()
    code = "from theorem.trial import fleet_trial; print(fleet_trial(11).chronicle.digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == digest
