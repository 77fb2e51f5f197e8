"""What gyre-report writes, in each of its formats.

A run directory has a ledger and an event log. One that has only the event log (a simulated run) has its figures and no summary.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import RenderableType
from rich.text import Text

from gyre import cli
from gyre.errors import UsageError, WorkFailed
from gyre.events import EventReader
from gyre.report import history, numbers, sketch, summary
from gyre.report.live import RunView
from gyre.report.show import show
from gyre.report.timeline import Timeline

_EVENTS: Final = 300  # of a page


def write(run_dirs: Sequence[Path], form: str, output: Path | None, figures: Sequence[str], burst: int | None) -> None:
    """Write the report of the runs to `output`, or stdout. `figures`: the names of those wanted, all if there are none. Raises `UsageError` for
    what is no run, `WorkFailed` when nothing can be drawn."""
    if form == "png" and output is None and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("--format png", "a terminal cannot show it", "name a file with -o")
    summaries = [None if only_events(d) else summary.summarize(d) for d in run_dirs]
    runs = [history.read(d, name) for d, name in zip(run_dirs, names(run_dirs), strict=True)]
    last = max((b.number for t in runs for b in t.bursts if b.end > b.start), default=0)
    if burst is not None and burst > last:
        raise UsageError("--burst", f"there is no burst {burst}", f"the last is {last}")
    match form:
        case "text":
            show(lambda width: _text(runs, summaries, width, figures, burst), output)
        case "json":
            whole = [_object(t, s, runs) for t, s in zip(runs, summaries, strict=True)]
            text = msgspec.json.format(msgspec.json.encode(whole[0] if len(whole) == 1 else whole), indent=2)
            _put(text + b"\n", output)
        case _:
            from gyre.report import page, plots

            chosen = [d for d in plots.drawings(runs, burst) if not figures or d.name in figures]
            if form == "html":
                views = [told(d, t.start) for d, t in zip(run_dirs, runs, strict=True)]
                _put(page.page(runs, [s for s in summaries if s is not None], chosen, views).encode(), output)
            elif chosen:
                _put(plots.save(chosen, form), output)
            else:
                raise WorkFailed(f"{run_dirs[0]}: nothing to draw: {'; '.join(m for t in runs for m in t.messages) or 'it has not the facts for it'}")


def told(run_dir: Path, zero: float) -> RunView:
    """A run's view, with the last of what happened in it beside its steps; times are counted from `zero` seconds after its first event."""
    view = RunView(run_dir.name)
    view.zero = zero
    view.recent = deque(maxlen=_EVENTS)
    for event in EventReader(run_dir / "events.jsonl").events():
        view.event(event)
    return view


def only_events(run_dir: Path) -> bool:
    return not (run_dir / "ledger.db").exists() and (run_dir / "events.jsonl").is_file()


def names(run_dirs: Sequence[Path]) -> list[str]:
    """What tells the directories apart: their names, with as many of their parents as that takes."""
    parts = [d.resolve().parts for d in run_dirs]
    for n in range(1, max(map(len, parts)) + 1):
        found = ["/".join(p[-n:]) for p in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


def _object(t: Timeline, s: dict[str, Any] | None, runs: Sequence[Timeline]) -> dict[str, Any]:
    known = s if s is not None else {"schema": "gyre.report/1", "run_id": t.name, "steps": len(t.steps)}
    return {**known, "figures": numbers.as_json(t, [o for o in runs if o is not t])}


def _text(runs: Sequence[Timeline], summaries: Sequence[dict[str, Any] | None], width: int, figures: Sequence[str],
          burst: int | None) -> list[RenderableType]:  # fmt: skip
    parts: list[RenderableType] = []
    for t, s in zip(runs, summaries, strict=True):
        if s is not None and not figures:
            parts.append(summary.drawing(s, width))
        if t.failure:
            parts.append(Text(f"{t.name} failed: {t.failure}", style="red"))
        parts += [Text(f"{t.name}: {m}") for m in t.messages]
    return parts + sketch.sketches(runs, width, figures, burst)


def _put(data: bytes, output: Path | None) -> None:
    if output is None:
        cli.stdout().write(data)
    else:
        output.write_bytes(data)
