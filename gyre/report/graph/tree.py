"""A prefix graph for a terminal: a rectangle per segment, first children in their parent's column below it, others indented at right angles.

So an execution that goes on and on stays one column, and only branches move right. What colours say, numbers say too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from gyre.report.figures import packed
from gyre.report.graph.layout import Layout, Segment
from gyre.report.graph.svg import ends

_COLOURS: Final = ("blue", "yellow", "green", "magenta", "cyan", "red")
_NARROWEST: Final = 30


def sketch(layout: Layout, width: int) -> Text:
    """The whole graph as lines at most `width` wide."""
    width = max(_NARROWEST, min(width, 160))
    text = Text(no_wrap=True, overflow="crop")
    said = [Text(layout.title, style="bold"), Text(layout.facts)]
    said += [Text.assemble((f"({index + 1})", _COLOURS[index % len(_COLOURS)]), f" {words}") for index, words in layout.chosen]
    for line in said:
        text.append_text(packed(line.split(" "), width, gap=" ", indent=2)).append("\n")
    for i, (prefix, lead, joined) in _walk(layout):
        _draw(text, layout.segments[i], prefix, lead, joined, width)
    text.rstrip()
    return text


def _walk(layout: Layout) -> Iterator[tuple[int, tuple[str, str, bool]]]:
    """Segments with what stands before their lines, before their first line, and whether they hang right below their parent."""
    stack = [(root, ("", "", False)) for root in reversed(layout.roots)]
    while stack:
        i, place = stack.pop()
        yield i, place
        prefix, children = place[0], layout.segments[i].children
        if children:  # the first comes last: its siblings are drawn beside the line that leads to it
            stack.append((children[0], (prefix, prefix, True)))
            stack += [(child, (f"{prefix} │  ", f"{prefix} ├──", False)) for child in reversed(children[1:])]


def _draw(text: Text, s: Segment, prefix: str, lead: str, joined: bool, width: int) -> None:
    if len(prefix) > width - _NARROWEST:
        keep = width - _NARROWEST - 1
        prefix, lead = f"…{prefix[-keep:]}", f"…{lead[-keep:]}"
    room = width - len(prefix) - 4
    style = _COLOURS[s.through[0] % len(_COLOURS)] if s.through else "grey50"
    marks = "".join(f"({index + 1})" for index in s.through[:4]) + ("…" if len(s.through) > 4 else "")
    notes = f" · {', '.join(s.notes)}" if s.notes else ""
    head = f"{s.head()}{notes}"
    head = set_cell_size(head, min(cell_len(head), max(1, room - len(marks) - 2)))
    fill = "─" * max(0, room - 1 - cell_len(head) - (len(marks) + 1 if marks else 0))
    text.append(lead, style="grey50")
    text.append(f"╭{'┴' if joined else '─'}", style=style)
    text.append(f" {head} ", style="bold" if s.through else "")
    text.append(f"{fill} {marks}╮\n" if marks else f"{fill}╮\n", style=style)
    for role, words in ends(s):
        text.append(prefix, style="grey50")
        text.append("│ ", style=style)
        text.append(f"{role} " if role else "", style="grey50")
        text.append(set_cell_size(words, room - (len(role) + 1 if role else 0)))
        text.append(" │\n", style=style)
    text.append(prefix, style="grey50")
    text.append(f"╰{'┬' if s.children else '─'}{'─' * (room + 1)}╯\n", style=style)
