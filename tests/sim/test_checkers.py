"""The checkers catch planted faults: a sound trace, one entry changed, a law named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gyre.rules.named import parse_rule
from gyre.rules.roles import CellPhase, Move, Stay, View
from gyre.rules.workload import Workload
from gyre.sim import compare
from gyre.sim.checkers import Violation, check
from gyre.sim.compare import law_of, simulate

Trace = list[tuple[Any, ...]]


def first(trace: Trace, kind: str, nth: int = 0) -> int:
    return [i for i, e in enumerate(trace) if e[1] == kind][nth]


def doubled(trace: Trace, kind: str) -> None:
    trace.insert(first(trace, kind) + 1, trace[first(trace, kind)])


def dropped(trace: Trace, kind: str) -> None:
    del trace[first(trace, kind)]


def changed(trace: Trace, kind: str, place: int, value: Any, nth: int = 0) -> None:
    i = first(trace, kind, nth)
    trace[i] = (*trace[i][:place], value, *trace[i][place + 1 :])


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (lambda t: doubled(t, "end"), "ended twice"),
        (lambda t: dropped(t, "end"), "not whole"),
        (lambda t: doubled(t, "ready"), "ready before"),
        (lambda t: doubled(t, "take"), "taken twice"),
        (lambda t: doubled(t, "micro"), "two at once"),
        (lambda t: dropped(t, "micro"), "1 micro-steps counted"),
        (lambda t: changed(t, "micro", 2, 3), "did not train"),
        (lambda t: changed(t, "take", 3, 7), "taken at step 7"),
        (lambda t: doubled(t, "commit"), "committed"),
        (lambda t: changed(t, "commit", 3, (0,)), "a step of 1 groups"),
        (lambda t: changed(t, "publish", 3, 5, 1), "of version 5"),
        (lambda t: changed(t, "admit", 3, 1), "at version 1"),
        (lambda t: doubled(t, "admit"), "out of order"),
        (lambda t: t.insert(1, (0.0, "role", 3, "rollout", "to_train", 0)), "before one that comes first"),
        (lambda t: changed(t, "role", 3, "train"), "was rollout, not train"),
        (lambda t: changed(t, "end", 0, 3000.0), "less than its"),
        (lambda t: t.append((0.0, "publish", 3, 3)), "time went back"),
        (lambda t: t.pop(), "the run ended"),
    ],
)  # fmt: skip
def test_planted(tiny: Callable[..., Workload], fault: Callable[[Trace], Any], law: str) -> None:
    world = simulate(tiny(), parse_rule("elastic"), 0.0, 0)
    trace = list(world.trace)
    check(trace, law_of(world, "elastic"))
    fault(trace)
    with pytest.raises(Violation, match=law):
        check(trace, law_of(world, "elastic"))


def test_a_greedy_rule_is_caught_with_its_seed(tiny: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that calls itself the paper's and looks at no water level: the failure says how to repeat it."""

    def greedy(view: View) -> Move | Stay:
        for c in view.cells[:-1]:
            if view.steps_left and c.phase is CellPhase.ROLLOUT and not any(x.phase is CellPhase.TO_TRAIN for x in view.cells):
                return Move(c.name, CellPhase.TRAIN, "greedy")
            if not view.steps_left and c.phase is CellPhase.TRAIN:
                return Move(c.name, CellPhase.ROLLOUT, "over")
        return Stay("")

    monkeypatch.setattr(compare, "make_rule", lambda _: greedy)
    with pytest.raises(Violation, match="left rollout at w = 4") as caught:
        simulate(tiny(), parse_rule("elastic"), 0.0, 7)
    assert caught.value.__notes__ == [
        "seed 7; to repeat it, the same gyre-sim command with: --rule elastic --set workload.seeds=[7] --set system.target_staleness=0"
    ]
