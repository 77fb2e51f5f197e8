"""What drawings share: colours, moving averages, bars, units. Pure; no terminal, no files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

BLUE, ORANGE, GREEN, PINK, SKY, RED, INK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222", "#8A8A8A"
SERIES: Final = (BLUE, ORANGE, GREEN, PINK, SKY, RED)  # Okabe and Ito's, told apart by colour-blind eyes
_TICKS: Final = "▁▂▃▄▅▆▇█"
_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Text that came from an agent, without control sequences."""
    return _CONTROL.sub("", text)


def brief(value: float | None, form: str = ".2f") -> str:
    """A number for people, a dash for none."""
    return "–" if value is None else format(value, form)


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / (i + 1 - max(0, i + 1 - window)) for i in range(len(values))]


def chart(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """Values as `height` lines of blocks, the top line first: an eighth of a line is the finest step."""
    if not values:
        return ["" for _ in range(height)]
    n = min(width, len(values))
    cells = [mean(values[i * len(values) // n : max(i * len(values) // n + 1, (i + 1) * len(values) // n)]) or 0.0 for i in range(n)]
    eighths = [round((min(max(c, low), high) - low) / (high - low) * height * 8) for c in cells]
    rows = []
    for row in range(height - 1, -1, -1):
        fill = [min(8, max(0, e - row * 8)) for e in eighths]
        rows.append("".join(" " if f == 0 else _TICKS[f - 1] for f in fill))
    return rows


def score_chart(text: Text, values: Sequence[float], width: int, height: int) -> None:
    """Append a chart of values between 0 and 1, with an axis, to `text`."""
    for i, row in enumerate(chart(values, width, height, 0.0, 1.0)):
        text.append(f"\n{'1.0' if i == 0 else '0.0' if i == height - 1 else '   '} │", style="grey50")
        text.append(row, style="green")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, labels: int = 1) -> Group:
    """All columns: those there is no room for stand in further blocks below, each behind the first `labels` columns (behind the first alone where
    these leave no room)."""
    columns = list(zip(head, *rows, strict=True))
    wide = [2 + max(map(len, column)) for column in columns]
    keep = labels if sum(wide[:labels]) + max(wide[labels:], default=0) <= width else 1
    blocks = [list(range(keep))]
    for i in range(keep, len(columns)):
        if len(blocks[-1]) > keep and sum(wide[k] for k in blocks[-1]) + wide[i] > width:
            blocks.append(list(range(keep)))
        blocks[-1].append(i)
    return Group(*(_block([columns[i] for i in block]) for block in blocks))


def first_columns(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """As many columns as there is room for, the first in any case."""
    columns: list[tuple[str, ...]] = []
    for column in zip(head, *rows, strict=True):
        width -= 2 + max(map(len, column))
        if columns and width < 0:
            break
        columns.append(column)
    return _block(columns)


def _block(columns: Sequence[Sequence[str]]) -> Table:
    made = Table(box=None, header_style="grey50", padding=(0, 1))
    for title, *_ in columns:
        made.add_column(Text(title), justify="right", no_wrap=True)
    for row in list(zip(*columns, strict=True))[1:]:
        made.add_row(*map(Text, row))  # never markup
    return made


def packed(entries: Iterable[Text], width: int, gap: str = "   ", indent: int = 0) -> Text:
    """Entries beside each other in lines at most `width` wide, those behind the first indented. One that fits a line is not broken, others are
    broken at words."""
    lines = [Text()]
    for entry in entries:
        whole = entry.cell_len <= width - indent
        for i, part in enumerate([entry] if whole else entry.split(" ")):
            between = " " if i else gap
            if lines[-1].plain.strip() and lines[-1].cell_len + len(between) + part.cell_len > width:
                lines.append(Text(" " * indent))
            elif lines[-1].plain.strip():
                lines[-1].append(between)
            lines[-1].append_text(part)
    return Text("\n").join(lines)


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def clock(seconds: float) -> str:
    """Seconds as [h:]mm:ss, with a minus before what is negative."""
    s = abs(int(seconds))
    if int(seconds) < 0:
        return f"-{clock(s)}"
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60:02d}:{s % 60:02d}"


def unit(seconds: float) -> tuple[float, str]:
    """(seconds in it, its word) of the unit in which a length of so many seconds reads well."""
    return (1.0, "seconds") if seconds < 300 else (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def edges(values: Sequence[float], limits: Sequence[float], n: int) -> tuple[list[float], bool]:
    """The n + 1 edges of n bins that hold `values` (not empty) and reach the `limits`, and whether they are logarithmic: they are where limits lie so
    far off that linear bins would show nothing of the values."""
    far, low = max([*values, *limits]), min(values)
    if low > 0 and far > 15 * sorted(values)[len(values) // 2]:
        low, high = low * 0.9, far * 1.2
        return [low * (high / low) ** (i / n) for i in range(n + 1)], True
    return [(far * 1.03 or 1.0) * i / n for i in range(n + 1)], False
