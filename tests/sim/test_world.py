"""The simulated world: figures had by hand, determinism, dispatch, faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.errors import UsageError
from gyre.rules.named import parse_rule
from gyre.rules.workload import Workload, load
from gyre.sim.compare import compare, simulate
from gyre.sim.measure import measure
from gyre.sim.world import World

Tiny = Callable[..., Workload]
WORKLOADS = Path(__file__).parents[2] / "examples" / "workloads"
RULES = ("elastic", "lookahead", "colocate", "async:1", "async:2+stream")


def run(w: Workload, rule: str, target: float = 0.0, seed: int = 0) -> World:
    return simulate(w, parse_rule(rule), target, seed)


def times(world: World, kind: str) -> list[float]:
    return [e[0] for e in world.trace if e[1] == kind]


def test_colocate_by_hand(tiny: Tiny) -> None:
    """4 executions end at 3600 s; 4 cells turn (10 s); 4 micro-steps of 1800 s, one each; update 20 s, publication 60 s; then again."""
    world = run(tiny(), "colocate")
    burst = 3600 + 10 + 1800 + 20 + 60
    assert times(world, "publish") == pytest.approx([0, burst, 2 * burst])
    m = measure(world)
    assert m.discrete == [0.0] * 4
    assert m.bound_hours == pytest.approx(2 * (3600 + 1800 + 20 + 60) / 3600)
    trained = burst - 3610  # of a burst, until told to go back: the last commit comes 60 s before the publication
    assert m.train_fraction == pytest.approx([(trained - 60) / burst] * 4)
    assert m.idle_train == pytest.approx(20 / (trained - 60))


def test_elastic_by_hand(tiny: Tiny) -> None:
    """w = 4 of 8 slots: the core turns at 0, a satellite after it (4 <= 6 - 2), then none until all have ended, at 3600 s: the two cells that train
    take two micro-steps each, unless a third joins at 3610 s and a fourth at 3620 s: they find the queue empty only if all are claimed. All four
    micro-steps are queued at 3600 s; two are claimed at once, one at 3610 s, one at 3620 s, which ends the work at 5420 s."""
    world = run(tiny(), "elastic")
    assert times(world, "commit")[0] == pytest.approx(3620 + 1800 + 20)
    moves = [(e[0], e[2]) for e in world.trace if e[1] == "role" and e[4] == "to_train"][:4]
    assert moves == [(0.0, 0), (10.0, 1), (3600.0, 2), (3610.0, 3)]


@pytest.mark.parametrize(
    ("rule", "commit"),
    [
        ("async:1", 3600 + 4 * 1800 + 20),  # all four micro-steps on one cell
        ("async:2", 3600 + 2 * 1800 + 20),
    ],
)
def test_fixed_split_by_hand(tiny: Tiny, rule: str, commit: float) -> None:
    assert times(run(tiny(), rule), "commit")[0] == pytest.approx(commit)


def test_streaming_begins_with_the_first_group(tiny: Tiny) -> None:
    """With one rollout cell of two slots the second group's executions wait for the first's: streaming trains the first meanwhile."""
    w = tiny("system.cells=2")
    waiting, streaming = run(w, "async:1"), run(w, "async:1+stream")
    assert times(waiting, "take")[:2] == pytest.approx([7200, 7200])
    assert times(streaming, "take")[:2] == pytest.approx([3600, 7200])
    assert times(streaming, "commit")[0] == pytest.approx(7200 + 3600 + 20)


def test_slots_stop_the_youngest(tiny: Tiny) -> None:
    """Colocate with phi = 0.5: the executions that the burst does not need stand still while all cells train, and keep what they have done."""
    w = tiny("system.target_staleness=0.5", "workload.execution_h.sigma=0.3", "workload.bursts=3")
    world = run(w, "colocate", 0.5)
    length = w.workload.duration_s
    stopped = [e for e in world.trace if e[1] == "end" and e[0] > times(world, "commit")[0]][:2]
    assert all(e[0] > length(0, e[2] // 2, e[2] % 2) for e in stopped)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("file", ["nl2repo-122b.toml", "shared-rate.toml"])
def test_two_runs_of_one_seed_are_one(file: str, rule: str) -> None:
    w = load(WORKLOADS / file, ["workload.bursts=2", "system.target_staleness=1.5", "system.groups_per_step=4"])
    first, second, other = run(w, rule, 1.5, 3), run(w, rule, 1.5, 3), run(w, rule, 1.5, 4)
    assert first.digest() == second.digest() != other.digest()
    assert first.events > 0


@pytest.mark.parametrize("target", [1.0, 1.5])
def test_staleness_is_what_the_quota_predicts(target: float) -> None:
    """Boundary dispatch, after the first two bursts."""
    w = load(WORKLOADS / "nl2repo-122b.toml", ["workload.bursts=8"])
    for rule in ("elastic", "colocate", "async:4"):
        d = measure(run(w, rule, target)).discrete
        assert sum(d) / len(d) == pytest.approx(target, abs=0.05)


def test_continuous_dispatch(tiny: Tiny) -> None:
    w = load(WORKLOADS / "shared-rate.toml", ["workload.bursts=8", "system.dispatch=continuous", "system.target_staleness=3.0"])
    for rule in ("elastic", "async:3+stream"):
        d = measure(run(w, rule, 3.0)).discrete
        assert sum(d) / len(d) == pytest.approx(3.0, abs=0.15)


@pytest.mark.parametrize("seed", range(6))
def test_cells_die_and_come_back(seed: int) -> None:
    """The checkers hold with cells dying, the core too, and the run completes."""
    sets = ["workload.bursts=3", "system.groups_per_step=4", "workload.faults={ cell_mtbf_h = 6.0, repair_s = 900.0 }"]
    for rule in RULES:
        world = run(load(WORKLOADS / "nl2repo-122b.toml", sets), rule, 1.5, seed)
        assert any(e[1] == "role" and e[4] == "lost" for e in world.trace)


def test_calibration() -> None:
    """Two numbers of the file are fitted to the reported bands: over tuned Async 1.42-1.53, over Colocate 1.36-1.47, each give or take 0.05.
    The best splits are 4 and 5 (docs/scheduling.md has the full comparison)."""
    w = load(WORKLOADS / "nl2repo-122b.toml", ["workload.seeds=[0]"])
    rows = {(r.rule, r.target_staleness): r for r in compare(w, ["elastic", "async:4", "async:5", "colocate"])}
    for target in (1.0, 1.5):
        speedup = rows["elastic", target].speedup
        assert 1.37 <= min(speedup["async:4"], speedup["async:5"]) <= 1.58
        assert 1.31 <= speedup["colocate"] <= 1.52
    bound = rows["elastic", 1.0].bound_ratio
    assert bound is not None and bound <= 1.02
    assert rows["elastic", 1.5].bound_ratio is None


def test_lookahead_knows_what_shared_engines_lose() -> None:
    w = load(WORKLOADS / "shared-rate.toml", ["workload.seeds=[0]"])
    rows = compare(w, ["elastic", "lookahead"])
    assert all(r.speedup["elastic"] > 1.03 for r in rows if r.rule == "lookahead")


def test_what_a_workload_cannot_run(tiny: Tiny) -> None:
    for rules, problem in ((["async:4"], "leaves no cell"), (["elastic", "elastic"], "stands there twice")):
        with pytest.raises(UsageError, match=problem):
            compare(tiny(), rules)
    with pytest.raises(UsageError, match="colocate needs 2 groups"):
        compare(tiny("system.dispatch=continuous", "system.target_staleness=0.5"), ["colocate"])
