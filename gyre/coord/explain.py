"""Why a run failed, from the logs of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TextIO

import click

from gyre.coord import machine as m
from gyre.report.figures import plain

_LOG_TAIL_LINES: Final = 40


def explain(end: m.End, logs: Path, out: TextIO) -> None:
    """Say why a run failed: the culprit's own error line if it had one, else the reason and the end of its log, from its last traceback on."""
    path = logs / f"{end.culprit}.log"
    lines = path.read_text(errors="replace").splitlines() if end.culprit is not None and path.exists() else []
    if lines and lines[-1].startswith("error: "):
        click.echo(f"error: {end.culprit}: {plain(lines[-1].removeprefix('error: '))}", file=out)
        return
    first = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=len(lines) - _LOG_TAIL_LINES)
    for line in lines[max(0, first) :][-2 * _LOG_TAIL_LINES :]:
        click.echo(f"  {end.culprit} | {plain(line)}", file=out)
    click.echo(f"error: {end.reason}", file=out)
