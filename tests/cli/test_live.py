"""The live view: what it shows, and that nothing from an agent reaches the terminal as more than text."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from gyre.events import Event
from gyre.report.live import RunView
from gyre.types import RolloutState, Version
from gyre.wire.messages import Counters, ProcessStatus


def picture(view: RunView, width: int = 100, height: int = 40) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=False).print(view)
    return out.getvalue()


def event(kind: str, fields: dict[str, Any], at: float = 0.0) -> Event:
    return Event(seq=0, t_wall=1e9 + at, t_mono=at, proc="buffer", cause="", kind=kind, fields=fields)


def counters(**states: int) -> Counters:
    full = {s.value: states.get(s.value, 0) for s in RolloutState}
    return Counters(
        id="c", seq=1, admitted=sum(full.values()), states=full, water_level=3, step=2, total_steps=10, published=Version(1, 2), term=1,
        groups_open=3, eval_outstanding=0, finished=False, ready_groups=1, taken_groups=2,
    )  # fmt: skip


def busy(n_cells: int, n_steps: int) -> RunView:
    view = RunView("mine")
    view.counters = counters(queued=40, running=3, consumed=13)
    view.event(event("buffer_started", {"staleness_predicted": 1.5}))
    for i in range(n_cells):
        cell = f"cell{i:04d}"
        view.event(event("role", {"cell": cell, "phase": "train" if i == 0 else "to_rollout" if i == 1 else "rollout"}))
        gauges = {"tokens_s": 1234.5, "kv_use": 0.43, "in_flight": 12.0, "queued": 3.0}
        for kind in ("train", "rollout"):
            view.processes[f"{cell}-{kind}"] = ProcessStatus(
                name=f"{cell}-{kind}", kind=kind, phase="working", cell=cell, detail=f"{kind}s", gauges=gauges if kind == "rollout" else {},
                version=Version(1, 7),
            )  # fmt: skip
    view.processes["box"] = ProcessStatus(name="box", kind="sandbox", phase="working", detail="3 of 4 slots")
    for step in range(1, n_steps + 1):
        stats = {"reward_mean": step / n_steps, "staleness_mean": 1.25, "staleness_p95": 2, "staleness_max": 3, "trainable_tokens": 1234}
        view.event(event("step", {"step": step, "stats": stats, "metrics": {"loss": -0.5, "grad_norm": None}}, at=step * 60.0))
        view.event(event("checkpoint", {"step": step, "path": "/somewhere/" + "x" * 100}, at=step * 60.0))
    return view


def test_before_anything_is_known() -> None:
    view = RunView("mine")
    view.processes["box"] = ProcessStatus(name="box", kind="sandbox", phase="starting")
    assert "gyre mine" in picture(view) and "box" in picture(view) and "starting" in picture(view)


def test_steps_evaluations_and_counts() -> None:
    view = RunView("mine")
    view.counters = counters(running=3, consumed=13)
    for step, reward in ((1, 0.25), (2, 0.75)):
        fields = {"step": step, "stats": {"reward_mean": reward, "trainable_tokens": 1234}, "metrics": {"loss": -0.5, "grad_norm": None}}
        assert view.event(event("step", fields)) == f"step {step}: reward {reward}, loss -0.5, tokens 1234"
    assert view.event(event("eval", {"version": 0, "reward_mean": 0.5, "graded": 7})) == "eval: held-out at version 0: reward 0.5 over 7 tasks"
    assert view.event(event("admitted", {"group": "g1"})) is None
    text = picture(view)
    for shown in ("step 2/10", "now 0.50", "held-out at 0: 0.50", "executions 16", "water level 3", "policy 2", "3 running", "13 consumed", "█"):
        assert shown in text, shown


def test_what_an_operator_looks_for() -> None:
    text = picture(busy(3, 4))
    for shown in (
        "groups: 2 open, 1 ready, 2 in the step", "staleness predicted 1.50, measured 1.25, p95 2, max 3", "cell0000  train", "cell0001  to rollout",
        "cell0002  rollout", "1234  43%   12+3       7  rollouts", "box       working", "3 of 4 slots", "04:00  checkpoint: step 4",
    ):  # fmt: skip
        assert shown in text, (shown, text)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 24), (80, 40), (240, 70)])
@pytest.mark.parametrize("n_cells", [1, 5, 1000])
def test_it_fits_the_terminal(width: int, height: int, n_cells: int) -> None:
    """The newest step and event are there, and what there is no room for is counted."""
    lines = picture(busy(n_cells, 30), width, height).splitlines()
    assert len(lines) <= height - 1 and max(map(len, lines)) <= width  # a terminal's last line is for the cursor
    text = "\n".join(lines)
    assert "water level 3" in text and "checkpoint: step 30" in text and any(line.split()[:2] == ["30", "1"] for line in lines), text
    shown, more = len(re.findall(r"^ (?:cell\d|box)", text, re.M)), re.search(r"^ …  +(\d+) more", text, re.M)
    assert shown + (int(more[1]) if more else 0) == n_cells + 1


def test_all_states_are_there_on_a_narrow_terminal() -> None:
    view = busy(1, 3)
    view.counters = counters(queued=140, running=32, grading=11, waiting=12, ready=8, claimed=40, consumed=1300, discarded=77)
    text = picture(view, 80, 24)
    assert sum(int(n) for n in re.findall(r"■ (\d+) [a-z]+", text)) == view.counters.admitted == 1620
    assert max(map(len, text.splitlines())) <= 80


def test_lines_that_steps_and_events_do_not_need_are_given_to_processes() -> None:
    view = busy(0, 0)
    view.processes |= {f"box{i}": ProcessStatus(name=f"box{i}", kind="sandbox", phase="working") for i in range(14)}
    text = picture(view, 80, 24)
    assert " more" not in text and "box13" in text and len(text.splitlines()) <= 23


def test_an_evaluation_under_way_is_seen() -> None:
    view = busy(1, 2)
    held = view.counters
    assert held is not None
    view.event(event("eval_issued", {"eval": "e1.4", "version": 4, "n": 100}))
    assert "evaluating" not in picture(view), "none of its executions is outstanding"
    view.counters = structs.replace(held, eval_outstanding=63)
    assert "evaluating version 4: 37 of 100" in picture(view, 80, 24)
    view.event(event("eval_issued", {"eval": "e1.5", "version": 5, "n": 100}))
    assert "evaluating versions 4, 5: 137 of 200" in picture(view)
    view.event(event("term", {"term": 2, "step": 4}))
    assert "evaluating version 4: 37 of 100" in picture(view), "a restarted core left version 5 behind"
    view.event(event("eval", {"eval": "e1.4", "version": 4, "reward_mean": 0.5, "graded": 100}))
    assert "evaluating: 63 to go" in picture(view)
    view.event(event("finished", {"counts": {}}))
    assert "evaluating" not in picture(view)


def test_agents_text_is_only_text() -> None:
    view = RunView("mine")
    view.processes["box"] = ProcessStatus(name="box", kind="sandbox", phase="working", detail="\x1b[2Jgone [red]x[/]\nno")
    line = view.event(event("reissued", {"rollout": "g0.1", "detail": "\x1b]0;title\x07 said [bold]hi[/bold]\r"}))
    assert line == "reissued: rollout g0.1, detail  said [bold]hi[/bold]"
    text = picture(view)
    assert "\x1b" not in text and "gone [red]x[/] no" in text and "[bold]hi[/bold]" in text


def test_a_line_says_what_there_is_and_each_word_once() -> None:
    term = {"term": 1, "cell": "cell0", "step": 0, "steps_replayed": 0, "groups_ready_again": 0}
    assert RunView("mine").event(event("term", term)) == "term 1: cell cell0"
    assert RunView("mine").event(event("term", {**term, "term": 2, "step": 3})) == "term 2: cell cell0, step 3"
    assert RunView("mine").event(event("voided", {"n": 0})) == "voided"
