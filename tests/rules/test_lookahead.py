"""`lookahead`: literal views in, decisions out; and the fluid model against figures had by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gyre.rules.fluid import Fluid, Plan, Survival, ageing
from gyre.rules.lookahead import PAPER, lookahead
from gyre.rules.roles import CellPhase, CellView, GroupView, Known, Move, Pace, Stay, View

HOUR = 3600.0
PACE = Pace(t0_s=0.02, t1_s=0.001, tokens=10_000, tool_s=200.0)


def view(
    w: int, ready: int, *, train_s: float, pace: Pace | None = None, ages: float = 0.0, phases: str = "RRRR", ended: int = 64, **extra: Any
) -> View:
    """Four cells of 40 slots, B = 4, mu = 1, N = 8; groups of 8 live executions of one age; all that ended took about an hour."""
    cells = tuple(CellView(n, CellPhase.TRAIN if p == "T" else CellPhase.ROLLOUT, 40, 3) for n, p in zip("abcd", phases, strict=True))
    lengths = tuple(HOUR * (0.9 + 0.2 * i / 64) for i in range(ended))
    known = Known((GroupView(8, ages),) * (w // 8), lengths, lengths[-16:], train_s, 10.0, 5.0, 5.0, 0.0, pace)
    return View(0.0, cells, w, 3, 1, ready, 4, 1, 8, known=known, **extra)


@pytest.mark.parametrize(
    ("v", "expected"),
    [
        (view(32, 0, train_s=60), "a"),  # slots: to turn costs nothing, so the paper's rule
        (view(128, 0, train_s=60), None),
        (view(32, 0, train_s=60, pace=PACE), None),  # shared: a cell without work would only slow the others down
        (view(32, 4, train_s=4 * HOUR, pace=PACE, ages=HOUR / 2), "a"),  # there is work, for hours
        (view(0, 4, train_s=60, phases="TTTR"), "d"),
        (view(32, 4, train_s=60, phases="TTTT"), None),
        (view(32, 0, train_s=60, ended=8), "a"),  # too few to know: the paper's rule
        (view(32, 0, train_s=60, pace=PACE, ended=8), None),  # or, shared, that rule when there is work
    ],
)
def test_lookahead(v: View, expected: str | None) -> None:
    decision = lookahead(v)
    assert (decision.cell if isinstance(decision, Move) else None) == expected
    assert decision == lookahead(v)  # a function of the view alone


def test_it_says_until_when() -> None:
    decision = lookahead(view(128, 0, train_s=60))
    assert isinstance(decision, Stay) and decision.above == 120 and decision.until is not None and decision.until > 0


def test_survival() -> None:
    s = Survival([100.0, 200.0, 300.0, 400.0])
    assert s.at(0) == 1.0 and s.at(250) == pytest.approx(0.5, abs=0.02)
    assert 0 < s.at(1000) < s.at(500) < 0.2


def test_ageing() -> None:
    """Alone on a cell hardly slower than unloaded; a root of the quadratic is a fixed point of what it describes."""
    assert ageing(PACE, 1e-9, 1) == pytest.approx(1.0)
    rate = ageing(PACE, 40, 2)
    token_s = ((10_000 * 0.02 + 200) / rate - 200) / 10_000
    decoding = 40 * 10_000 * token_s / (10_000 * token_s + 200)
    assert token_s == pytest.approx(0.02 + 0.001 / 2 * decoding)


def test_burst_end_by_hand() -> None:
    """All ready and nothing live: three cells train four groups of an hour, a fourth joins at once: an hour, then update and publication."""
    v = view(0, 4, train_s=HOUR, phases="TTTR")
    assert v.known is not None
    assert Fluid(v, v.known).burst_end(PAPER, False) == pytest.approx(HOUR + 5 + 5, rel=0.01)
    live = view(32, 0, train_s=60.0)
    assert live.known is not None
    assert Fluid(live, live.known).burst_end(PAPER, False) == pytest.approx(1.1 * HOUR + 70, rel=0.06)


def test_plans() -> None:
    plan = Plan(((1.0, 0.0), (math.inf, 2.0)))
    assert plan.turns(40, 40, 0, 0) and not plan.turns(41, 40, 0, 0) and plan.turns(999, 40, 4, 1) and not plan.turns(999, 40, 3.9, 1)
    assert Plan(((1.0, 5.0),)).turns(0, 0, 0, 3)  # nothing is left to serve
