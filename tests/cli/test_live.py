"""The live view: what it shows, and that nothing from an agent reaches the terminal as more than text."""

from __future__ import annotations

import io

from rich.console import Console

from gyre.report.live import RunView
from gyre.types import RolloutState, Version
from gyre.wire.messages import Counters


def picture(view: RunView, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(view.render())
    return out.getvalue()


def counters(**states: int) -> Counters:
    full = {s.value: states.get(s.value, 0) for s in RolloutState}
    return Counters(
        id="c", seq=1, admitted=sum(full.values()), states=full, water_level=3, step=2, total_steps=10, published=Version(1, 2), term=1,
        groups_open=1, eval_outstanding=0, finished=False,
    )  # fmt: skip


def test_before_anything_is_known() -> None:
    view = RunView("mine")
    view.worker("box", "sandbox", "starting", "", {})
    assert "gyre mine" in picture(view) and "gyre-sandbox" in picture(view)


def test_steps_evaluations_and_counts() -> None:
    view = RunView("mine")
    view.counters = counters(running=3, consumed=13)
    for step, reward in ((1, 0.25), (2, 0.75)):
        fields = {"step": step, "stats": {"reward_mean": reward, "trainable_tokens": 1234}, "metrics": {"loss": -0.5, "grad_norm": None}}
        assert view.event("step", fields) == f"step {step}: reward {reward}, loss -0.5, tokens 1234"
    assert view.event("eval", {"version": 0, "reward_mean": 0.5, "graded": 7}) == "eval: held-out at version 0: reward 0.5 over 7 tasks"
    assert view.event("admitted", {"group": "g1"}) is None
    text = picture(view)
    for shown in ("step 2/10", "now 0.50", "held-out at 0: 0.50", "executions 16", "water level 3", "policy 2", "running 3", "consumed 13", "█"):
        assert shown in text, shown


def test_agents_text_is_only_text() -> None:
    view = RunView("mine")
    view.worker("box", "sandbox", "working", "\x1b[2Jgone [red]x[/]", {})
    line = view.event("reissued", {"rollout": "g0.1", "detail": "\x1b]0;title\x07 said [bold]hi[/bold]\r"})
    assert line == "reissued: rollout g0.1, detail  said [bold]hi[/bold]"
    text = picture(view)
    assert "\x1b" not in text and "[red]x[/]" in text and "[bold]hi[/bold]" in text
