"""A stall in full, for people: who waits for whom since when, the counters, what each process said of itself, and its stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gyre.events import Event
from gyre.report.figures import plain, table
from gyre.report.read import timestamp


def drawing(event: Event, width: int) -> Sequence[RenderableType]:
    f = event.fields
    parts: list[RenderableType] = [Text(f"{timestamp(event.t_wall)}: nothing progressed for {_seconds(f.get('idle_s'))}", style="bold")]
    counts = ", ".join(f"{n} {state}" for state, n in f.get("counts", {}).items() if n)
    groups = ", ".join(
        f"{f[f'groups_{k}']} {word}" for k, word in (("open", "open"), ("ready", "ready"), ("taken", "in the step")) if f"groups_{k}" in f
    )
    parts.append(Text(f"step {f.get('step')} of term {f.get('term')}; executions: {counts or 'none'}; groups: {groups or 'none'}"))
    rows = [(_word(x, "who"), _word(x, "for"), _seconds(x.get("since_s"))) for x in f.get("waits", [])]
    parts.append(table(("who", "waits for", "since"), rows, width) if rows else Text("nobody waits at the buffer"))
    parts += [Text(plain(text)) for text in f.get("cells", [])]
    said, stacks = f.get("processes", {}), f.get("stacks", {})
    for name in [*said, *(n for n in stacks if n not in said)]:
        text = Text.assemble((plain(name), "bold"), f" {plain(said.get(name, ''))}")
        if name in stacks:
            text.append("\n" + (plain(stacks[name]) or "it did not answer: stopped, out of reach, or gone"))
        parts.append(text)
    if not stacks:
        parts.append(Text("No coordinator gathered stacks: kill -USR1 PID has a process write its own to stderr."))
    return parts


def _word(wait: dict[str, Any], key: str) -> str:
    return plain(str(wait.get(key, "")))


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} s"
