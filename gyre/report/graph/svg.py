"""A prefix graph as SVG: rectangles, right-angle edges, colours of the chosen trajectories. Nothing is loaded, no script; page.py adds folding.

Each segment is a group `#sN` (in the order of the layout) with `data-p`, its parent, and `data-c`, its column, of class `c` if a
chosen trajectory passes; the edge to it is `#eN`.
"""

from __future__ import annotations

import html
from typing import Final

from rich.cells import set_cell_size

from gyre.report.figures import GREY, SERIES
from gyre.report.graph.layout import Layout, Segment

WIDTH, HEIGHT, STEP_X, STEP_Y, MIDDLE, TOP = 262, 62, 306, 78, 31, 18  # of a rectangle; from one to the next; where edges meet it; the margin
_CELLS: Final = 41  # letters in a line of a rectangle
CSS: Final = (
    "text{font:10px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre;fill:#222}"
    ".h{font-weight:600}.r{fill:#6a6a6a}.n{fill:#8a4b00}.m{fill:#fff;font-weight:600;text-anchor:middle}"
)


def svg(layout: Layout) -> str:
    """The picture with its title above it and the list of trajectories."""
    columns = max((s.column for s in layout.segments), default=0) + 1
    rows = max((s.row for s in layout.segments), default=0) + 1
    legend = [f'<text x="{TOP}" y="24" class="h">{text(layout.title)}</text><text x="{TOP}" y="40">{text(layout.facts)}</text>']
    for i, (index, words) in enumerate(layout.chosen[:12]):
        legend.append(f'{_mark(TOP + 8, 56 + 18 * i, index)}<text x="{TOP + 22}" y="{60 + 18 * i}">{text(words)}</text>')
    more = len(layout.chosen) - 12
    if more > 0:
        legend.append(f'<text x="{TOP + 22}" y="{60 + 18 * 12}">and {more} more</text>')
    above = 64 + 18 * min(13, len(layout.chosen))
    width, height = max(640, TOP + columns * STEP_X), above + TOP + rows * STEP_Y
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"><style>{CSS}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(legend)}<g transform="translate({TOP},{above})">{body(layout)}</g></svg>\n'
    )


def body(layout: Layout) -> str:
    """Edges and rectangles, the origin at the first root's corner."""
    parts = []
    order = sorted(
        range(len(layout.segments)), key=lambda i: (layout.segments[i].through != (), -i)
    )  # where edges lie together, first children's on top
    for i in order:
        s = layout.segments[i]
        if s.parent >= 0:
            p = layout.segments[s.parent]
            x, y, turn, end = p.column * STEP_X + WIDTH, p.row * STEP_Y + MIDDLE, s.column * STEP_X - 22, s.row * STEP_Y + MIDDLE
            colour, width = (colour_of(s.through[0]), 2.5) if s.through else (GREY, 1.2)
            parts.append(f'<path id="e{i}" d="M{x} {y}H{turn}V{end}H{turn + 22}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    parts += [_rectangle(i, s) for i, s in enumerate(layout.segments)]
    return "\n".join(parts)


def _rectangle(i: int, s: Segment) -> str:
    colour, width = (colour_of(s.through[0]), 2) if s.through else (GREY, 1)
    notes = f" {', '.join(s.notes)}" if s.notes else ""
    room = _CELLS - 3 * min(4, len(s.through)) - len(s.head())
    out = [
        f'<g id="s{i}" class="s{" c" if s.through else ""}" data-p="{s.parent}" data-c="{s.column}" '
        f'transform="translate({s.column * STEP_X},{s.row * STEP_Y})">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{"#fff" if s.through else "#f6f6f6"}" stroke="{colour}" stroke-width="{width}"/>'
        f'<text x="8" y="16" xml:space="preserve"><tspan class="h">{s.head()}</tspan>'
        + (f'<tspan class="n">{text(_cut(notes, room))}</tspan>' if room > 4 else "")
        + "</text>"
    ]
    for line, (role, words) in enumerate(ends(s)):
        out.append(f'<text x="8" y="{32 + 15 * line}"><tspan class="r">{text(role)}</tspan> {text(_cut(words, _CELLS - len(role) - 1))}</text>')
    if s.n_tokens:
        for part, fill in ((s.n_sampled, "#c9c9c9"), (s.n_trained, colour)):
            out.append(f'<rect x="4" y="{HEIGHT - 7}" width="{(WIDTH - 8) * part / s.n_tokens:.1f}" height="3" fill="{fill}"/>' if part else "")
    out += [_mark(WIDTH - 12 - 18 * n, 12, index) for n, index in enumerate(reversed(s.through[:3]))]
    if len(s.through) > 3:
        out.append(f'<text x="{WIDTH - 62}" y="15.5" text-anchor="end">+{len(s.through) - 3}</text>')
    return "".join(out) + "</g>"


def ends(s: Segment) -> list[tuple[str, str]]:
    """The first and the last message, for excerpts."""
    return s.messages[:1] + s.messages[1:][-1:]


def colour_of(trajectory: int) -> str:
    return SERIES[trajectory % len(SERIES)]


def text(value: str) -> str:
    """What layout.clean made plain, for XML."""
    return html.escape(value)


def _cut(value: str, cells: int) -> str:
    whole = set_cell_size(value, max(1, cells)).rstrip()
    return whole if whole == value.rstrip() else set_cell_size(value, max(1, cells - 1)).rstrip() + "…"


def _mark(x: int, y: int, index: int) -> str:
    """A trajectory's number in its colour."""
    return f'<circle cx="{x}" cy="{y}" r="8" fill="{colour_of(index)}"/><text x="{x}" y="{y + 3.5}" class="m">{index + 1}</text>'
