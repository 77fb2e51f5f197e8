"""Text to a terminal, a pipe or a file: a picture on a terminal, the same without colours and without trailing blanks elsewhere.

A pipe is as wide as COLUMNS says, or 120. NO_COLOR and the terminal's width are rich's to honour.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType

from gyre import cli

WIDTH: Final = 120


def show(draw: Callable[[int], Sequence[RenderableType]], output: Path | None) -> None:
    """Draw for the width there is and write, a blank line behind each part. `output`: a file; None: stdout."""
    if output is None:
        cli.stdout()  # it may be closed
        console = Console()
        if console.is_terminal:
            for part in draw(console.width):
                console.print(part)
                console.print()
            return
    text = text_of(draw, stdout_width() if output is None else WIDTH)
    if output is None:
        cli.stdout().write(text.encode())
    else:
        output.write_text(text, encoding="utf-8")


def stdout_width() -> int:
    """Of the terminal; of a pipe what COLUMNS says, or 120."""
    console, columns = Console(), os.environ.get("COLUMNS", "")
    return console.width if console.is_terminal else int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH


def text_of(draw: Callable[[int], Sequence[RenderableType]], width: int) -> str:
    """What `draw` draws for that width, as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=False, color_system=None)
    for part in draw(width):
        console.print(part)
        console.print()
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().rstrip().splitlines())
