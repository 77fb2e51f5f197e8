"""Rules as literal tables: View in, Decision out."""

from __future__ import annotations

import pytest

from gyre.errors import UsageError
from gyre.rules.microstep import MICROSTEP_TRANSITIONS
from gyre.rules.named import make_rule, parse_rule
from gyre.rules.roles import CELL_TRANSITIONS, CellEvent, CellPhase, CellView, Move, View, turned
from gyre.types import MicroStepState

PHASES = {"R": CellPhase.ROLLOUT, "t": CellPhase.TO_TRAIN, "T": CellPhase.TRAIN, "r": CellPhase.TO_ROLLOUT, "L": CellPhase.LOST}


def view(
    phases: str, w: int, steps_left: int = 3, ready: int = 0, *, burst: int = 5, cell_burst: int = 5, fixed: str = "", admitting: int = 0
) -> View:
    """Cells a, b, c… of 10 executions each; B = 4, mu = 3."""
    cells = tuple(CellView(n, PHASES[p], 10, cell_burst, n in fixed) for n, p in zip("abcdefgh", phases, strict=False))
    return View(0.0, cells, w, burst, steps_left, ready, 4, 3, 2, admitting)


def said(name: str, v: View) -> str:
    """`b>train`, `a>rollout` or `stay`."""
    decision = make_rule(name)(v)
    return f"{decision.cell}>{decision.to}" if isinstance(decision, Move) else "stay"


@pytest.mark.parametrize(
    ("v", "expected"),
    [
        (view("RRRR", 31), "stay"),
        (view("RRRR", 30), "a>train"),  # w <= 40 - 10
        (view("tRRR", 0), "stay"),  # moves are serial
        (view("TRRR", 21), "stay"),
        (view("TRRR", 20), "b>train"),
        (view("TrRR", 10), "c>train"),  # b does not serve yet: 10 <= 20 - 10
        (view("TTTR", 1), "stay"),
        (view("TTTR", 0), "d>train"),
        (view("TTTT", 0, ready=4), "stay"),
        (view("TTTT", 3, ready=3), "d>rollout"),  # continuous dispatch: nobody would serve them
        (view("TTTT", 3, ready=4), "stay"),
        (view("LRRR", 0), "stay"),  # no core, no step to join
        (view("rRRR", 0), "stay"),
        (view("TLRR", 10), "c>train"),
        (view("RRRR", 10, fixed="a"), "stay"),
        (view("TRRR", 20, fixed="b"), "c>train"),
        # the end of a burst: the last satellite first, then the core
        (view("TTTR", 12, 0), "c>rollout"),
        (view("TTrR", 12, 0), "b>rollout"),
        (view("TtrR", 12, 0), "b>rollout"),  # it would find no step to join
        (view("TrrR", 12, 0), "a>rollout"),
        (view("TrrR", 12, 0, ready=4), "stay"),  # the next batch is ready, and three cells hold the 12
        (view("TrrR", 12, 0, ready=3), "a>rollout"),
        (view("TrrR", 12, 0, ready=4, admitting=19), "a>rollout"),  # 31 > 30
        (view("TrrR", 12, 0, ready=4, admitting=18), "stay"),
        (view("TLrR", 12, 0, ready=4, admitting=9), "a>rollout"),  # a lost cell holds nothing
        (view("rrrR", 12, 0), "stay"),
        # the next burst has begun before all were told
        (view("TTRR", 30, 3, 4, cell_burst=4), "b>rollout"),
        (view("TRRR", 30, 3, 4, cell_burst=4), "stay"),  # the core stayed: its batch is under way
        (view("TRRR", 30, 2, 0, cell_burst=4), "stay"),
        (view("TRRR", 30, 3, 0, cell_burst=4), "a>rollout"),
    ],
)
def test_elastic(v: View, expected: str) -> None:
    assert said("elastic", v) == expected


@pytest.mark.parametrize(
    ("v", "expected"),
    [
        (view("RRRR", 5, 3, 11), "stay"),
        (view("RRRR", 5, 3, 12), "a>train"),
        (view("tRRR", 5, 3, 12), "b>train"),  # all together
        (view("tttR", 5, 3, 12), "d>train"),
        (view("TTTT", 5, 3, 12), "stay"),
        (view("TTTT", 5, 1, 4), "stay"),
        (view("TTTT", 5, 0), "a>rollout"),
        (view("rTTT", 5, 0), "b>rollout"),
        (view("rrrr", 5, 0), "stay"),
        (view("TRRR", 5, 3, 0, cell_burst=4), "a>rollout"),
        (view("RRRR", 0, 3, 7), "a>train"),  # nothing runs that could make more ready
        (view("RRRR", 0, 3, 0), "a>train"),  # all was lost: the step closes with nothing
        (view("TTTT", 5, 1, 3), "a>rollout"),  # the step waits for executions that nobody serves
        (view("rTTT", 5, 1, 3), "b>rollout"),
        (view("RRRR", 5, 1, 3), "stay"),
        (view("TTTR", 5, 1, 3, fixed="d"), "stay"),
    ],
)
def test_colocate(v: View, expected: str) -> None:
    assert said("colocate", v) == expected


@pytest.mark.parametrize(
    ("rule", "v", "expected"),
    [
        ("async:2", view("RRRR", 99), "a>train"),
        ("async:2", view("tRRR", 99), "b>train"),
        ("async:2", view("TTRR", 99), "stay"),
        ("async:2", view("TTRR", 0, 0, cell_burst=0), "stay"),
        ("async:2", view("TTTR", 0), "c>rollout"),
        ("async:2", view("TLRR", 0), "c>train"),
        ("async:2+stream", view("TRRR", 99), "b>train"),
        ("async", view("TRRR", 99), "stay"),
        ("async", view("RRRR", 99, fixed="a"), "stay"),
    ],
)
def test_fixed_split(rule: str, v: View, expected: str) -> None:
    assert said(rule, v) == expected


def test_names() -> None:
    assert (parse_rule("async:4").trainers, parse_rule("async:4").stream) == (4, False)
    assert parse_rule("async+stream").stream and parse_rule("async+stream").trainers is None
    assert parse_rule("elastic").stream
    for bad in ("", "Elastic", "async:", "async:0", "async:-1", "async:x", "async+", "elastic:2", "async:1+stream+stream"):
        with pytest.raises(UsageError, match="--rule"):
            make_rule(bad)


def test_tables() -> None:
    """Every phase can be left and reached; a pair that the table lacks is refused."""
    assert {p for p, _ in CELL_TRANSITIONS} == set(CELL_TRANSITIONS.values()) == set(CellPhase)
    assert {e for _, e in CELL_TRANSITIONS} == set(CellEvent)
    assert turned(CellPhase.ROLLOUT, CellEvent.ORDER_TRAIN) is CellPhase.TO_TRAIN
    with pytest.raises(ValueError, match="rollout knows no joined"):
        turned(CellPhase.ROLLOUT, CellEvent.JOINED)
    assert {s for s, _ in MICROSTEP_TRANSITIONS} | {MicroStepState.COMMITTED} == set(MICROSTEP_TRANSITIONS.values()) == set(MicroStepState)
