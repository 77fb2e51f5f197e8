"""What is said beside the coordinator's live view stays on the terminal, and no frame leaves lines behind."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from gyre_commands.coord import stopped_at

from gyre.types import Version
from gyre.wire.messages import Counters

DRAWS = """
import logging, sys
from gyre.cli import start_logging
from gyre.coord.launch import Plan
from gyre.coord.window import Window

start_logging("info", False)
window = Window("mine")
for n in range(3):
    window.show(Plan(f"box{n}", "sandbox", [], {}, ""), "working")
    window._drawn = 0.0
    window.draw()
    if n == 1:
        window.say("stopping [in] order")
        logging.getLogger("gyre").warning("box0 is back")
window.draw(last=True)
logging.getLogger("gyre").warning("all is over")
"""


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end, of what rich writes: carriage returns, line feeds, one line up, erase the line."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
        match token:
            case "\r":
                column = 0
            case "\n":
                row, lines = row + 1, lines if row + 1 < len(lines) else [*lines, ""]
            case "\x1b[1A":
                row = max(0, row - 1)
            case "\x1b[2K":
                lines[row] = ""
            case _ if len(token) == 1:
                lines[row] = (lines[row].ljust(column)[:column] + token + lines[row][column + 1 :])[:500]
                column += 1
    return [line.rstrip() for line in lines]


def test_what_is_said_beside_the_view_stays() -> None:
    ours, inner = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100", "LINES": "30"}
    child = subprocess.Popen([sys.executable, "-c", DRAWS], stdin=inner, stdout=inner, stderr=inner, env=env)
    os.close(inner)
    text = b""
    while chunk := read(ours):
        text += chunk
    assert child.wait(60) == 0, text.decode()
    os.close(ours)
    shown = screen(text.decode())
    picture = "\n".join(shown)
    assert shown[0] == "stopping [in] order" and shown[1].endswith("WARNING gyre: box0 is back"), picture
    assert picture.count("gyre mine") == 1 and [picture.count(f"box{n} ") for n in (1, 2)] == [1, 1], f"one frame is left:\n{picture}"
    assert shown[-2].endswith("all is over"), picture


def read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # its other end is closed
        return b""


@pytest.mark.parametrize("step", [0, 7])
def test_the_last_line_of_a_stopped_run(step: int) -> None:
    counters = Counters(
        id="c", seq=1, admitted=0, states={}, water_level=0, step=step, total_steps=10, published=Version(1, 2), term=1, groups_open=0,
        eval_outstanding=0, finished=False, ready_groups=0, taken_groups=0,
    )  # fmt: skip
    assert stopped_at(counters) == f"stopped at step {step} of 10; the same command with --resume goes on"
    assert stopped_at(None) == "stopped before the run had begun; start it again"
