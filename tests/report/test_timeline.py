"""From events to the numbers of every figure: small logs, worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import synthetic

from gyre.events import Event
from gyre.report import history, numbers, timeline
from gyre.report.timeline import Burst, Execution, Group, Mark, MarkKind, RoleSpan, Step, Timeline
from gyre.rules.roles import CellPhase

EPOCH = 1e9


def log(*lines: tuple[float, str, dict[str, Any]]) -> Timeline:
    events = [Event(seq=i, t_wall=EPOCH + at, t_mono=at, proc="buffer", cause="", kind=kind, fields=f) for i, (at, kind, f) in enumerate(lines)]
    return history.from_events("hand", events, harness_timeout_s=60.0, overall_timeout_s=120.0)


def role(cell: str, before: str, to: str, phase: str, reason: str = "") -> dict[str, Any]:
    return {"cell": cell, "from": before, "to": to, "phase": phase, "reason": reason, "water_level": 1, "rule": "elastic", "burst": 1}


def ended(rollout: str, **more: Any) -> dict[str, Any]:
    return {"rollout": rollout, "group": rollout.partition(".")[0], "purpose": "train", "ending": "finished", "state": "waiting", **more}


BEGIN = (
    (0.0, "buffer_started", {"dispatch": "continuous"}),
    (1.0, "term", {"term": 1, "cell": "a-train", "step": 0}),
    (10.0, "publication", {"number": 0, "term": 1, "step": 0, "cells": ["a-rollout", "b-rollout"], "staleness_predicted": 1.0}),
    (10.0, "admitted", {"group": "g0", "version": 0, "rollouts": 2}),
    (10.0, "admitted", {"group": "g1", "version": 0, "rollouts": 2}),
    (10.0, "leased", {"holder": "box", "rollouts": ["g0.0", "g0.1"]}),
    (12.0, "leased", {"holder": "box", "rollouts": ["g1.0"]}),
    (20.0, "rollout_ended", ended("g0.0")),
    (30.0, "rollout_ended", ended("g0.1")),
    (30.0, "group_ready", {"group": "g0"}),
    (30.0, "leased", {"holder": "box", "rollouts": ["g1.1"]}),
)
WHOLE = (
    *BEGIN,
    (40.0, "role", role("a", "rollout", "train", "to_train", "w = 2 <= 2")),
    (45.0, "role", role("a", "to_train", "train", "train")),
    (50.0, "rollout_ended", ended("g1.0")),
    (60.0, "rollout_ended", ended("g1.1", ending="harness_timeout")),
    (60.0, "group_ready", {"group": "g1"}),
    (60.0, "admitted", {"group": "g2", "version": 0, "rollouts": 1}),
    (60.0, "role", role("b", "rollout", "train", "to_train")),
    (70.0, "role", role("b", "to_train", "train", "train")),
    (70.0, "joined", {"cell": "b", "step": 1, "seconds": 4.0}),
    (71.0, "leased", {"holder": "other", "rollouts": ["g2.0"]}),
    (80.0, "step_closed", {"step": 1, "groups": 1, "short": 0}),
    (92.0, "reduced", {"step": 1, "attempt": 2, "cells": ["a-train", "b-train"], "seconds": 2.0}),
    (100.0, "step", {"term": 1, "step": 1, "groups": ["g0"], "opened_at": EPOCH + 46.0, "sealed_at": EPOCH + 90.0,
                     "entries": [{"cell": "a-train", "incarnation": "i", "micro_steps": ["m0", "m2"]},
                                 {"cell": "b-train", "incarnation": "j", "micro_steps": ["m1"]}]}),
    (104.0, "rollout_ended", ended("g2.0")),
    (104.0, "group_ready", {"group": "g2"}),
    (110.0, "publication", {"number": 1, "term": 1, "step": 1, "cells": ["b-rollout"], "staleness_predicted": 1.0}),
)  # fmt: skip


def test_roles_and_training_fractions() -> None:
    t = log(*WHOLE)
    assert (t.start, t.end, t.cells, t.messages) == (10.0, 110.0, ("a", "b"), ())
    assert t.spans == (
        RoleSpan("a", CellPhase.ROLLOUT, 10.0, 40.0), RoleSpan("a", CellPhase.TO_TRAIN, 40.0, 45.0, "w = 2 <= 2"),
        RoleSpan("a", CellPhase.TRAIN, 45.0, 110.0), RoleSpan("b", CellPhase.ROLLOUT, 10.0, 60.0), RoleSpan("b", CellPhase.TO_TRAIN, 60.0, 70.0),
        RoleSpan("b", CellPhase.TRAIN, 70.0, 110.0),
    )  # fmt: skip
    assert timeline.train_fraction(t) == {"a": 0.65, "b": 0.4}
    assert timeline.phase_seconds(t)["a"] == {"rollout": 30.0, "to_train": 5.0, "train": 65.0, "to_rollout": 0.0, "lost": 0.0}


def test_bursts_steps_and_marks() -> None:
    t = log(*WHOLE)
    assert t.bursts == (Burst(1, 10.0, 110.0, 0, (1,), 1.0), Burst(2, 110.0, 110.0, 1, (), 1.0))
    assert t.steps == (Step(1, 46.0, 100.0, 80.0, 90.0, (("a", 2), ("b", 1))),)
    assert t.marks == (Mark(MarkKind.JOIN, 70.0, ("b",), 1, 4.0), Mark(MarkKind.REDUCE, 92.0, ("a", "b"), 1, 2.0, 2))
    assert timeline.bursts_to_show(t, 3) == [t.bursts[0]]


def test_the_last_publication_begins_no_burst() -> None:
    t = log(*WHOLE, (150.0, "eval", {}), (150.0, "finished", {}))
    assert (t.end, t.bursts[1].end) == (150.0, 110.0) and [b["number"] for b in numbers.as_json(t)["bursts"]] == [1]
    steps = {**BEGIN[0][2], "total_steps": 1}
    assert log((0.0, "buffer_started", steps), *WHOLE[1:], (150.0, "eval", {})).bursts[1].end == 110.0, "its evaluation is no burst"
    assert log(*WHOLE, (150.0, "group_ready", {"group": "g2"})).bursts[1].end == 150.0, "a burst is under way"


def test_executions_in_slots_and_the_water_level() -> None:
    t = log(*WHOLE)
    assert [(slot, e.rollout, e.start, e.end) for slot, e in timeline.in_slots(t.executions, t.end)] == [
        (0, "g0.0", 10.0, 20.0), (1, "g0.1", 10.0, 30.0), (2, "g1.0", 12.0, 50.0), (0, "g1.1", 30.0, 60.0), (3, "g2.0", 71.0, 104.0),
    ]  # fmt: skip
    assert t.water_level == ((10.0, 4), (20.0, 3), (30.0, 2), (50.0, 1), (60.0, 1), (104.0, 0))


def test_durations_of_queries_and_rollouts() -> None:
    queries, rollouts = timeline.durations(log(*WHOLE))
    assert sorted(queries) == [20.0, 33.0, 38.0]
    assert sorted(rollouts) == [10.0, 20.0, 30.0, 33.0, 38.0]


def test_staleness_both_ways_offered_and_trained() -> None:
    t = log(*WHOLE)
    assert timeline.trained(t) == [timeline.Sample(100.0, 0, 0.0)]
    # at the second publication g1 (admitted at the first) and g2 (halfway) are ready, g0 is consumed
    assert timeline.offered(t) == [timeline.Sample(110.0, 1, 1.0), timeline.Sample(110.0, 1, 0.5)]


def test_the_designs_example_of_interpolation() -> None:
    bursts = tuple(Burst(i + 1, 10.0 * i, 10.0 * (i + 1), i) for i in range(4))
    steps = tuple(Step(i + 1, 10.0 * i, 10.0 * i + 9) for i in range(4))
    t = Timeline("t", 0.0, 40.0, bursts=bursts, steps=steps, groups=(Group("g", 5.0, 0, 1, ready=20.0, step=4),))
    assert timeline.trained(t) == [timeline.Sample(39.0, 3, 2.5)]


def test_speedup_is_from_the_start_to_each_step() -> None:
    fast = Timeline("fast", 10.0, 50.0, steps=(Step(1, 10.0, 20.0), Step(2, 20.0, 50.0)))
    slow = Timeline("slow", 0.0, 90.0, steps=(Step(1, 0.0, 30.0), Step(2, 30.0, 60.0), Step(3, 60.0, 90.0)))
    assert timeline.time_to_step(fast) == {1: 10.0, 2: 40.0}
    assert timeline.speedup(fast, slow) == [(1, 3.0), (2, 1.5)]


def test_fixed_roles_are_those_of_the_processes() -> None:
    t = log((0.0, "term", {"cell": "core", "step": 0}), (2.0, "publication", {"step": 0, "cells": ["cell0", "cell1"]}), (6.0, "finished", {}))
    assert t.spans == tuple(RoleSpan(c, CellPhase.TRAIN if c == "core" else CellPhase.ROLLOUT, 2.0, 6.0) for c in ("core", "cell0", "cell1"))
    assert t.messages == ("roles are fixed: no cell turned",)
    assert timeline.train_fraction(t) == {"core": 1.0, "cell0": 0.0, "cell1": 0.0}


def test_a_cell_is_lost_and_comes_back() -> None:
    t = log(
        (0.0, "publication", {"step": 0, "cells": []}), (10.0, "role", role("a", "train", "lost", "lost")),
        (12.0, "voided", {"cell": "a-train", "incarnation": "i", "micro_steps": ["m"]}), (15.0, "role", role("a", "lost", "rollout", "rollout")),
        (20.0, "finished", {}),
    )  # fmt: skip
    assert [(s.phase, s.start, s.end) for s in t.spans] == [("train", 0, 10), ("lost", 10, 15), ("rollout", 15, 20)]
    assert t.marks == (Mark(MarkKind.VOID, 12.0, ("a",)),)


def test_steps_that_a_restarted_core_took_back_do_not_count() -> None:
    step = {"term": 1, "groups": ["g0"], "entries": []}
    t = log(
        *BEGIN, (40.0, "step", {**step, "step": 1}), (41.0, "step", {**step, "step": 2, "groups": ["g1"]}),
        (50.0, "term", {"term": 2, "cell": "b", "step": 1}), (60.0, "publication", {"step": 1, "cells": []}),
    )  # fmt: skip
    assert [s.step for s in t.steps] == [1]
    assert {g.group: g.step for g in t.groups} == {"g0": 1, "g1": None}
    assert t.cells[0] == "b", "the core is the cell that has the term now"


def test_lost_leases_and_discarded_groups() -> None:
    t = log(
        *BEGIN,
        (35.0, "lease_lost", {"rollout": "g1.1", "epoch": 0, "holder": "box"}),
        (36.0, "leased", {"holder": "box", "rollouts": ["g1.1"]}),
        (44.0, "group_discarded", {"group": "g1", "reason": "run_ended", "graded": 0}),
        (50.0, "finished", {}),
    )
    assert [e for e in t.executions if e.rollout == "g1.1"] == [
        Execution("g1.1", "g1", "box", 30.0, 35.0, "", False), Execution("g1.1", "g1", "box", 36.0, 44.0, "", False),
    ]  # fmt: skip
    assert t.water_level[-1] == (44.0, 0)
    assert timeline.durations(t) == ([20.0], [10.0, 20.0])


def test_evaluation_holds_slots_and_counts_nowhere_else() -> None:
    t = log(
        (0.0, "publication", {"step": 0, "cells": ["a"]}), (0.0, "eval_issued", {"eval": "e1.0", "version": 0, "n": 1}),
        (1.0, "leased", {"holder": "box", "rollouts": ["e1.0.0"]}), (3.0, "rollout_ended", {**ended("e1.0.0"), "purpose": "eval"}),
    )  # fmt: skip
    assert t.executions == (Execution("e1.0.0", "e1.0", "box", 1.0, 3.0, "finished", True, True),)
    assert (t.water_level, timeline.durations(t)) == ((), ([], []))


@pytest.mark.parametrize(
    "events", [(), ((0.0, "buffer_started", {}), (1.0, "failure", {"reason": "no\x1b[31m engine"})), ((0.0, "new_kind", {"x": 1}),)]
)
def test_an_early_end_is_a_timeline_with_messages(events: tuple[tuple[float, str, dict[str, Any]], ...]) -> None:
    t = log(*events)
    assert t.messages == ("the event log names no cell: no roles", "nothing was published: no burst, no step")
    assert t.failure in ("", "no engine")
    assert numbers.as_json(t)["bursts"] == []


@pytest.mark.parametrize(("kind", "fields"), [("publication", {}), ("step", {"step": "x"}), ("admitted", {"group": "g"})])
def test_an_event_that_lacks_what_its_kind_needs(kind: str, fields: dict[str, Any]) -> None:
    assert log((0.0, kind, fields)).messages[-1].startswith(f"1 event left out: {kind}")


def test_a_clock_that_was_set_back_stands_still() -> None:
    t = log((0.0, "publication", {"step": 0, "cells": ["a"]}), (9.0, "admitted", {"group": "g", "version": 0, "rollouts": 1}), (5.0, "finished", {}))
    assert (t.groups[0].admitted, t.end) == (9.0, 9.0)


def test_the_burst_to_show_is_the_last_with_the_most_turns() -> None:
    turns = tuple(RoleSpan("a", CellPhase.TO_TRAIN, at, at + 1) for at in (1.0, 11.0, 12.0, 21.0, 22.0))
    t = Timeline("t", 0.0, 40.0, spans=turns, bursts=tuple(Burst(i, 10.0 * (i - 1), 10.0 * i, i, (i,)) for i in range(1, 5)))
    assert [b.number for b in timeline.bursts_to_show(t, 1)] == [3]
    assert [b.number for b in timeline.bursts_to_show(t, 3, 1)] == [1, 2, 3]
    assert [b.number for b in timeline.bursts_to_show(t, 3, 4)] == [2, 3, 4]


@pytest.mark.parametrize("dispatch", ["boundary", "continuous"])
def test_a_longer_log_adds_up(dispatch: str) -> None:
    t = history.from_events("made", synthetic.Made(dispatch).events())
    assert t.cells == tuple(synthetic.CELLS) and len(t.bursts) == synthetic.BURSTS + 1
    for seconds in timeline.phase_seconds(t).values():
        assert sum(seconds.values()) == pytest.approx(t.end - t.start)
    placed = timeline.in_slots(t.executions, t.end)
    assert sum((e.end or t.end) - e.start for e in t.executions) == pytest.approx(sum((e.end or t.end) - e.start for _, e in placed))
    for slot in {s for s, _ in placed}:
        held = sorted((e.start, e.end or t.end) for s, e in placed if s == slot)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(held)), "a slot holds one execution at a time"
    assert t.water_level[-1][1] == 0 and max(w for _, w in t.water_level) <= synthetic.QUOTA * synthetic.N
    assert len(timeline.trained(t)) == synthetic.BURSTS * synthetic.MU * synthetic.B


def test_cells_are_in_the_order_of_their_names_behind_the_core() -> None:
    roles = [(float(i), "role", role(c, "rollout", "rollout", "rollout")) for i, c in enumerate(("c10", "c9", "1", "c2"))]
    t = log((0.0, "term", {"cell": "c9-train", "step": 0}), *roles, (9.0, "publication", {"step": 0, "cells": ["c2-rollout", "b"]}))
    assert t.cells == ("c9", "1", "b", "c2", "c10")


def test_cells_begin_by_waking_and_a_stop_of_the_run_is_nobodys_role() -> None:
    """Rollout from 10 to 20, training from 20 on; the run is stopped at 30 and resumed by another coordinator at 100."""
    lines = (
        (0.0, "c1", "buffer_started", {}),
        (5.0, "c1", "role", role("a", "train", "rollout", "rollout")),
        (10.0, "c1", "publication", {"number": 0, "term": 1, "step": 0, "cells": ["a-rollout"], "staleness_predicted": 1.0}),
        (20.0, "c1", "role", role("a", "to_train", "train", "train")),
        (30.0, "c1", "leased", {"holder": "box", "rollouts": []}),
        (100.0, "c2", "buffer_started", {}),
        (110.0, "c2", "role", role("a", "train", "rollout", "rollout")),
        (120.0, "c2", "leased", {"holder": "box", "rollouts": []}),
    )
    events = [Event(seq=i, t_wall=EPOCH + at, t_mono=at, proc=p, cause="", kind=kind, fields=f) for i, (at, p, kind, f) in enumerate(lines)]
    t = history.from_events("hand", events, harness_timeout_s=60.0, overall_timeout_s=120.0)
    found = [(s.phase.value, s.end - s.start) for s in t.spans]
    assert found == [("rollout", 10.0), ("train", 10.0), ("lost", 70.0), ("to_rollout", 10.0), ("rollout", 10.0)]
